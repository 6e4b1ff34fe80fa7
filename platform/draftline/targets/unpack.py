"""Unpacks a GGUF file into a plain Hugging Face folder: `python -m draftline.targets.unpack GGUF FOLDER`.

A program of its own, so that whoever asks for a target never loads torch.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def unpack(gguf: Path, folder: Path) -> None:
    """Writes the dequantised weights (bfloat16 safetensors), tokenizer and chat template of `gguf` into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print(f"unpacking {gguf} into {folder}", flush=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # some are written for their owner alone; a cache may be shared
    print("unpacked", flush=True)


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m draftline.targets.unpack", description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    unpack(arguments.gguf, arguments.folder)


if __name__ == "__main__":
    main()
