"""A recipe from YAML and overrides: what is accepted, and the one message for each thing that is not."""

from pathlib import Path

import pytest

from draftline.errors import InputError
from draftline.recipe.load import dump_recipe, load_recipe, recipe_differences, recipe_sha256
from draftline.recipe.schema import Recipe, resolve_path

GOOD = """\
run_id: first
target:
  path: model
data:
  prompts: prompts.jsonl
draft:
  tap_layers: [2, 15, 27]
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(GOOD)
    return file


def refusal(file: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load_recipe(file, overrides)
    return str(caught.value).replace(f"{file}", "FILE")


def refusal_of(file: Path, text: str | bytes) -> str:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return refusal(file)


def test_overrides_apply_in_order_and_take_yaml_values(recipe_file: Path) -> None:
    overrides = (
        "training.epochs=2",
        "training.epochs=3",
        "training.optimizer={lr: 1, betas: [0.8, 0.9]}",
        "draft.tap_layers=[1, 4]",
        "target={hub: owner/name, engine_args: {a: {b: 1}}}",
        "target.engine_args.a.c=2",
        "serving.confidence_cut=0.2",
        "hidden_states.window_bytes=1GiB",
    )
    recipe = load_recipe(recipe_file, overrides)
    assert recipe.training.epochs == 3
    assert recipe.training.optimizer.lr == 1.0
    assert recipe.training.optimizer.betas == (0.8, 0.9)
    assert recipe.draft.tap_layers == [1, 4]
    assert recipe.target.hub == "owner/name"
    assert recipe.target.engine_args == {"a": {"b": 1, "c": 2}}
    assert recipe.serving.confidence_cut == 0.2
    assert recipe.hidden_states.window_bytes == 1 << 30


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.0e-3", "0.001", "+1e-3", "1e-03"])
def test_every_way_to_write_a_number_is_a_number(recipe_file: Path, text: str) -> None:
    assert load_recipe(recipe_file, [f"training.optimizer.lr={text}"]).training.optimizer.lr == 0.001


def test_a_quoted_number_stays_text(recipe_file: Path) -> None:
    assert refusal(recipe_file, 'training.optimizer.lr="1e-3"') == (
        '--set training.optimizer.lr="1e-3": training.optimizer.lr: found "1e-3"; allowed: number > 0'
    )


def test_a_date_stays_text(recipe_file: Path) -> None:
    assert load_recipe(recipe_file, ["run_id=2026-01-31"]).run_id == "2026-01-31"


def test_the_dump_reads_back_equal_and_hashes_equal(recipe_file: Path, tmp_path: Path) -> None:
    texts = "target.engine_args={block_size: 16, a: '1e3', b: '010', c: '1:30', d: '1.5e3', e: 'yes', f: '2026-01-31'}"
    recipe = load_recipe(recipe_file, ["training.optimizer.lr=1e-05", texts])
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(dump_recipe(recipe))
    assert load_recipe(dumped) == recipe
    assert recipe_sha256(load_recipe(dumped)) == recipe_sha256(recipe)
    assert recipe_sha256(load_recipe(recipe_file)) != recipe_sha256(recipe)


def test_differences_name_field_old_and_new(recipe_file: Path) -> None:
    def dumped(*overrides: str) -> dict:
        return load_recipe(recipe_file, overrides).model_dump(mode="json")

    assert recipe_differences(dumped(), dumped()) == []
    assert recipe_differences(
        dumped(), dumped("training.epochs=3", "draft.tap_layers=[1]", "target.engine_args={a: 1}")
    ) == [
        "target.engine_args: {} -> absent",
        "draft.tap_layers: [2, 15, 27] -> [1]",
        "training.epochs: 1 -> 3",
        "target.engine_args.a: absent -> 1",
    ]


def test_all_problems_come_in_one_message(recipe_file: Path) -> None:
    text = GOOD.replace("path: model", "pth: model") + "training:\n  epochs: two\n  optimizer: {lr: -1}\n"
    assert refusal_of(recipe_file, text) == "\n".join(
        [
            "FILE:3: target.pth: unknown key; did you mean `target.path`?",
            'FILE:9: training.epochs: found "two"; allowed: whole number >= 1',
            "FILE:10: training.optimizer.lr: found -1; allowed: number > 0",
        ]
    )


@pytest.mark.parametrize(
    ("key", "line", "message"),
    [
        ("trainig", "trainig: {}", "trainig: unknown key; did you mean `training`?"),
        ("epochs", "epochs: 3", "epochs: unknown key; did you mean `training.epochs`?"),
        (
            "zzz",
            "zzz: 3",
            "zzz: unknown key; allowed: run_id, seed, store, target, data, draft, extraction, hidden_states, training, "
            "evaluation, serving, failures, resources",
        ),
        (
            "3",
            "3: 4",
            "3: unknown key; allowed: run_id, seed, store, target, data, draft, extraction, hidden_states, training, "
            "evaluation, serving, failures, resources",
        ),
        (
            "yes",
            "yes: 4",
            "yes: unknown key; allowed: run_id, seed, store, target, data, draft, extraction, hidden_states, training, "
            "evaluation, serving, failures, resources",
        ),
    ],
)
def test_unknown_keys_name_the_nearest(recipe_file: Path, key: str, line: str, message: str) -> None:
    assert refusal_of(recipe_file, GOOD + line + "\n") == f"FILE:8: {message}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("serving: {port: '8000'}", 'serving.port: found "8000"; allowed: whole number >= 0 and <= 65535'),
        ("serving: {port: 70000}", "serving.port: found 70000; allowed: whole number >= 0 and <= 65535"),
        ("training: {epochs: 1.5}", "training.epochs: found 1.5; allowed: whole number >= 1"),
        ("training: {epochs: true}", "training.epochs: found true; allowed: whole number >= 1"),
        ("training: 3", "training: found 3; allowed: a mapping of keys"),
        (
            "serving: {confidence_cut: never}",
            'serving.confidence_cut: found "never"; allowed: auto or number >= 0 and <= 1',
        ),
        ("hidden_states: {protocol: udp}", 'hidden_states.protocol: found "udp"; allowed: one of tcp, rdma'),
        (
            "hidden_states: {window_bytes: 512MX}",
            'hidden_states.window_bytes: found "512MX"; allowed: bytes with a unit, such as 512MiB',
        ),
        (
            "hidden_states: {window_bytes: 0.5}",
            "hidden_states.window_bytes: found 0.5; allowed: bytes with a unit, such as 512MiB",
        ),
        (
            "training: {optimizer: {betas: [0.9]}}",
            "training.optimizer.betas: found [0.9]; allowed: list of 2: number >= 0 and < 1",
        ),
        (
            "training: {optimizer: {betas: [5, 5]}}",
            "training.optimizer.betas: found [5, 5]; allowed: list of 2: number >= 0 and < 1",
        ),
        ("seed: 4294967296", "seed: found 4294967296; allowed: whole number >= 0 and <= 4294967295"),
        ("seed: 010", 'seed: found "010"; allowed: whole number >= 0 and <= 4294967295'),
        ("seed: 1:30", 'seed: found "1:30"; allowed: whole number >= 0 and <= 4294967295'),
    ],
)
def test_wrong_types_and_units(recipe_file: Path, line: str, message: str) -> None:
    assert refusal_of(recipe_file, GOOD + line + "\n") == f"FILE:8: {message}"


def test_missing_fields_and_sections_say_what_they_are(recipe_file: Path) -> None:
    assert refusal_of(recipe_file, "run_id: first\ndata:\n  field: x\ndraft: {tap_layers: [1]}\n") == "\n".join(
        [
            "FILE:1: target: missing; allowed: a mapping of keys (The model whose decoding is sped up. Exactly one of "
            "`package`, `path` and `hub` names it)",
            "FILE:2: data.prompts: missing; allowed: text (JSONL file of prompts or conversations; relative to the "
            "recipe's folder)",
        ]
    )


def test_taps_must_increase(recipe_file: Path) -> None:
    text = GOOD.replace("[2, 15, 27]", "[2, 27, 15]")
    assert refusal_of(recipe_file, text) == "FILE:7: draft.tap_layers: tap_layers must increase, found [2, 27, 15]"


def test_no_taps(recipe_file: Path) -> None:
    assert refusal(recipe_file, "draft.tap_layers=[]") == (
        "--set draft.tap_layers=[]: draft.tap_layers: found []; allowed: list of at least 1: whole number >= 0"
    )


def test_the_target_has_one_source(recipe_file: Path) -> None:
    assert refusal(recipe_file, "target.hub=a/b") == (
        "FILE:2: target: name the target by exactly one of package, path, hub; found path, hub"
    )


def test_draft_length_beyond_the_block(recipe_file: Path) -> None:
    overrides = ("draft={tap_layers: [1], block_size: 4, block_layout: one_plus_n}", "serving.draft_tokens=4")
    assert refusal(recipe_file, *overrides) == (
        "--set serving.draft_tokens=4: serving.draft_tokens: serving.draft_tokens is 4, but draft.block_size 4 "
        "(one_plus_n) drafts at most 3 tokens"
    )


def test_arguments_that_the_chat_template_cannot_have(recipe_file: Path) -> None:
    override = "data.answer.chat_template_args={tokenize: false}"
    assert refusal(recipe_file, override) == (
        f"--set {override}: data.answer.chat_template_args: chat_template_args cannot hold tokenize: the pipeline sets "
        "that itself"
    )


def test_an_answer_longer_than_the_row(recipe_file: Path) -> None:
    assert refusal_of(recipe_file, GOOD + "training:\n  row_tokens: 128\n") == (
        "FILE:4: data.answer.max_tokens: data.answer.max_tokens is 512, but an answer must fit into a row with its "
        "prompt: training.row_tokens is 128"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.epoch=2", "training.epoch: unknown key; did you mean `training.epochs`?"),
        ("training.epochs.x=2", "training.epochs.x: unknown key; training.epochs has no keys of its own"),
        ("training", "found no KEY=VALUE; allowed: a dotted key and a value, such as training.epochs=2"),
        ("training..epochs=1", "found no KEY=VALUE; allowed: a dotted key and a value, such as training.epochs=2"),
        ("training.epochs=two", 'training.epochs: found "two"; allowed: whole number >= 1'),
        ("training.epochs=", "training.epochs: found null; allowed: whole number >= 1"),
        ("training={epoch: 2}", "training.epoch: unknown key; did you mean `training.epochs`?"),
        ("training.epochs=[", "not YAML: expected the node content, but found '<stream end>'"),
    ],
)
def test_bad_overrides_are_named(recipe_file: Path, override: str, message: str) -> None:
    assert refusal(recipe_file, override) == f"--set {override}: {message}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "FILE:1: found an empty file; allowed: a mapping of keys, such as run_id, target, data and draft"),
        (
            b"# only\n",
            "FILE:1: found an empty file; allowed: a mapping of keys, such as run_id, target, data and draft",
        ),
        (b"- a\n", 'FILE:1: found ["a"]; allowed: a mapping of keys, such as run_id, target, data and draft'),
        (b"run_id: a\nseed: \xff\n", "FILE:2: found the byte 0xff; allowed: UTF-8 text"),
        (b"run_id: a\nseed: [1\n", "FILE:3: not YAML: expected ',' or ']', but got '<stream end>'"),
        (b"run_id: a\n\nseed: \x01\n", "FILE:3: not YAML: found the character 0x1; allowed: printable text"),
        (b"run_id: a\nseed: 1\nrun_id: b\n", "FILE:3: run_id: found twice, first in line 1; allowed: once"),
        (
            b"run_id: a\ndata:\n  field: x\n  field: y\n",
            "FILE:4: data.field: found twice, first in line 3; allowed: once",
        ),
        (
            b"run_id: a\ntarget: &t\n  engine_args: *t\n",
            "FILE:2: target.engine_args: found an alias to what contains it; allowed: plain values",
        ),
        (
            b"run_id: !!python/object:os.system {}\n",
            "FILE:1: not YAML: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/object:os.system'",
        ),
        (
            b"run_id: a\nseed: !!set {b}\n",
            "FILE:2: not YAML: could not determine a constructor for the tag 'tag:yaml.org,2002:set'",
        ),
        (b"run_id: a\nseed: !!bool abc\n", "FILE:2: not YAML: abc cannot be read as bool"),
        (b"run_id: a\nseed: " + b"9" * 5000, f"FILE:2: not YAML: {'9' * 77}... cannot be read as int"),
        (b'run_id: a\nstore: "\\ud800"\n', "FILE:2: found half of a surrogate pair; allowed: Unicode text"),
        (b'run_id: a\n"\\ud800": 1\n', "FILE:2: found half of a surrogate pair; allowed: Unicode text"),
        (
            b"a0: &a0 [x]\n" + b"".join(b"a%d: &a%d [%s]\n" % (n, n, b"*a%d," % (n - 1) * 9) for n in range(1, 9)),
            "FILE:1: found more than 50000 values, aliases counted; allowed: fewer",
        ),
        (b"a: " + b"[" * 3000, "FILE:1: not YAML: found brackets nested beyond reason; allowed: plain values"),
        (b"run_id: a\n---\nrun_id: b\n", "FILE:2: not YAML: but found another document"),
    ],
)
def test_files_that_are_no_recipe(recipe_file: Path, content: bytes, message: str) -> None:
    assert refusal_of(recipe_file, content) == message


def test_keys_are_text_and_aliases_are_fine(recipe_file: Path) -> None:
    recipe_file.write_text(GOOD + "seed: &one 1\ntraining: {epochs: *one}\n")
    recipe = load_recipe(recipe_file, ["target.engine_args={1: {yes: 0x10, ~: +2}}"])
    assert recipe.target.engine_args == {"1": {"yes": 16, "~": 2}}
    assert recipe.training.epochs == 1


def test_missing_file_and_folder(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for name, found in {
        "no.yaml": "no such file",
        ".": "found a folder",
        "/dev/null": "found neither a file nor a folder",
        "x" * 300: "cannot be read (File name too long)",
        "loop": "cannot be read (Too many levels of symbolic links)",
    }.items():
        assert refusal(tmp_path / name) == f"FILE: {found}; allowed: the path of a recipe (YAML)"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("~no-such-user/x", "there is no such user"),
        ("a\0b", "it has a zero byte or half a character"),
        ("x" * 300, "File name too long"),
        ("loop", "Too many levels of symbolic links"),
    ],
)
def test_paths_that_no_file_system_holds(tmp_path: Path, value: str, reason: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError) as caught:
        resolve_path(tmp_path / "recipe.yaml", "data.prompts", value)
    shown = value if len(value) <= 80 else f"{value[:77]}..."
    message = f"{tmp_path}/recipe.yaml: data.prompts: found {shown!r}; allowed: a path ({reason})"
    assert str(caught.value) == message


def test_every_shipped_recipe_loads() -> None:
    shipped = sorted(Path(__file__).parents[2].glob("jobs/recipes/*.yaml"))
    assert shipped
    for file in shipped:
        assert isinstance(load_recipe(file), Recipe)
