"""Progress in a notebook, run by a real kernel."""

import importlib.util

import pytest

MISSING = [name for name in ("nbclient", "nbformat", "ipykernel") if importlib.util.find_spec(name) is None]
CODE = """
import podscale
recipe = podscale.load_recipe("digits").override({"train.epochs": 2, "train.eval_epochs": 1, "model.width": 4})
summary = podscale.train(recipe, pod=podscale.find_pod(virtual="1x1"))
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.filterwarnings("ignore")
def test_progress_is_one_output_of_the_cell_and_stderr_is_empty(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CODE)])
    NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = book.cells[0].outputs
    assert len(outputs) <= 3, [output.get("text", output.get("data")) for output in outputs]
    (html,) = [
        output.data["text/html"] for output in outputs if "progress" in output.get("data", {}).get("text/html", "")
    ]
    assert '<progress max="23" value="23"' in html
    assert html.count("(360 images)") == 2
    text = "".join(output.text for output in outputs if output.get("name") == "stdout")
    assert "batch norm" in text
    assert not [output for output in outputs if output.get("name") == "stderr"]
