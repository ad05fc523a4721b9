"""The notebook runs top to bottom, from where it lies and from the root, and what it shows is what it says."""

import re
import shutil

import pytest

from .conftest import MODELS

nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed: it is in the extra `test`")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: it is in the extra `test`")
pytest.importorskip("ipykernel", reason="ipykernel is not installed: it is in the extra `test`")

EXAMPLES = MODELS.parent
NOTEBOOK = EXAMPLES / "notebook.ipynb"


@pytest.fixture(autouse=True)
def _offline_on_one_thread(monkeypatch, tmp_path):
    for name, value in (("HF_HUB_OFFLINE", "1"), ("OMP_NUM_THREADS", "1"), ("PYTHONPATH", str(EXAMPLES.parent))):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))  # nobody's own settings


def code(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell) -> list[str]:
    """What a reader sees below it; warnings of other libraries, of which each machine has its own, apart."""
    outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return [output.get("text") or output.data.get("text/html") or output.data["text/plain"] for output in outputs]


def test_it_runs_and_shows_what_it_was_saved_with():
    saved, ran = nbformat.read(NOTEBOOK, 4), nbformat.read(NOTEBOOK, 4)
    for cell in code(ran):
        cell.outputs = []
    nbclient.NotebookClient(ran, timeout=300, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    assert [cell.execution_count for cell in code(saved)] == list(range(1, len(code(saved)) + 1))
    measured = 0
    for before, after in zip(code(saved), code(ran), strict=True):
        both = shown(before), shown(after)
        if "measured" in before.metadata.get("tags", ()):  # on the machine that saved it: the same but for its numbers
            both, measured = (
                tuple([re.sub(r"\s*[\d.]+", " N", text) for text in texts] for texts in both),
                measured + 1,
            )
        assert both[1] == both[0], before.source
    assert measured == 2 and not any(output.get("name") == "stderr" for cell in code(saved) for output in cell.outputs)
    told = "\n".join(text for cell in code(ran) for text in shown(cell))
    assert told.count("True") == 3 and "False" not in told
    assert told.count("\ndrafted ") > 2 and len(set(re.findall(r"background: (#\w+)", told))) > 5


def test_it_finds_its_models_from_the_root(tmp_path):
    notebook = nbformat.read(NOTEBOOK, 4)
    notebook.cells = [*code(notebook)[:2], nbformat.v4.new_code_cell("print(target.device, len(tokenizer) > 0)")]
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "models").symlink_to(MODELS)
    shutil.copy(NOTEBOOK, tmp_path / "examples")
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert shown(notebook.cells[2]) == ["cpu True\n"]


def test_its_links_lead_somewhere():
    pages = "\n".join(cell.source for cell in nbformat.read(NOTEBOOK, 4).cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)\s]+)\)", pages)
    assert len(links) > 5 and [link for link in links if not (EXAMPLES / link.partition("#")[0]).exists()] == []
