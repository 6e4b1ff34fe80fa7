"""Asks a served model over HTTP, as any client would."""

from __future__ import annotations

import http.client
import json
import shlex
import urllib.error
import urllib.request
from typing import Any

from draftline.errors import RunFailed


class ServeUnanswered(RunFailed):
    """The endpoint did not answer as an OpenAI-compatible server does. Says the URL and what came back."""


def ask(url: str, model: str, prompt: str, *, max_tokens: int = 64, timeout_s: float = 120.0) -> str:
    """The model's greedy answer to one user message. `url` is the endpoint without `/v1`. Raises ServeUnanswered."""
    answer = chat(url, model, prompt, max_tokens=max_tokens, timeout_s=timeout_s)
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise ServeUnanswered(f"{url}: no answer in {json.dumps(answer)[:300]}") from None
    if not text:
        raise ServeUnanswered(f"{url}: the answer of {model} is empty")
    return text


def chat(url: str, model: str, prompt: str, *, max_tokens: int = 64, timeout_s: float = 120.0) -> Any:
    """The endpoint's whole response to `ask`'s question, as parsed JSON. Raises ServeUnanswered."""
    return _call(f"{url}/v1/chat/completions", timeout_s, _body(model, prompt, max_tokens))


def list_models(url: str, *, timeout_s: float = 10.0) -> list[str]:
    """Names of the models that the endpoint serves. Raises ServeUnanswered."""
    answer = _call(f"{url}/v1/models", timeout_s)
    try:
        return [model["id"] for model in answer["data"]]
    except (KeyError, TypeError):
        raise ServeUnanswered(f"{url}: no list of models in {json.dumps(answer)[:300]}") from None


def proxy_answers(url: str, *, timeout_s: float = 2.0) -> bool:
    """True when a Serve proxy listens at `url`, whatever it serves."""
    try:
        _call(f"{url}/-/routes", timeout_s)
    except ServeUnanswered:
        return False
    return True


def curl_line(url: str, model: str, prompt: str, *, max_tokens: int = 64) -> str:
    """The same question as a shell command to copy."""
    body = json.dumps(_body(model, prompt, max_tokens))
    return f"curl {url}/v1/chat/completions -H 'content-type: application/json' -d {shlex.quote(body)}"


def _body(model: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}


def _call(url: str, timeout_s: float, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"content-type": "application/json"})
    # Straight to the endpoint, whatever HTTP proxy the environment names.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise ServeUnanswered(f"{url}: HTTP status {error.code}: {error.read(300).decode(errors='replace')}") from error
    except json.JSONDecodeError as error:
        raise ServeUnanswered(f"{url}: the answer is not JSON: {error.msg}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise ServeUnanswered(f"{url}: {reason} (waited at most {timeout_s:g} s)") from error
