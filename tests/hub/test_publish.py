"""Drafters on a Hub, pushed and pulled: `huggingface_hub` and transformers talk HTTP to `hub_server.py`, in processes
of their own."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from typer.testing import CliRunner

from hf_hyperdflash import DeepseekV4MTPDrafter, HyperDFlashDrafter, __version__
from hf_hyperdflash.cli.app import app
from hf_hyperdflash.hub.publish import drafter_files, planned_push

from ..conftest import mostly_nightly, prompt, tiny_config, tiny_drafter, tiny_target
from ..helpers.headed_drafters import learned
from ..helpers.hub_server import HubServer, Repo
from ..helpers.processes import python
from .test_loading import KINDS, UNROLLED, written


def code_of(drafter) -> set[str]:
    """What it is made of, `tests/contracts/test_portable.py` says."""
    return {*drafter.carried_code(), "custom_generate/generate.py"}


CODE = code_of(tiny_drafter(tiny_target()))
WHOLE = CODE | {"README.md", "config.json", "model.safetensors"}
SETUP = """
import json, sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
folder = Path(sys.argv[1])
def target():
    return AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
def written(model, **options):
    return model.generate(torch.load(folder / "prompt.pt"), max_new_tokens=20, do_sample=False, **options)[0].tolist()
def sum_of(model):
    return [type(model).__name__, sum(p.double().sum().item() for p in model.parameters())]
def failure(call, *args, **options):
    try:
        call(*args, **options)
    except (OSError, ValueError) as error:
        return type(error).__name__ + ": " + str(error)
told = {}
"""


@pytest.fixture
def hub():
    with HubServer({"hf_token"}) as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target, its drafter, a prompt and what the target writes."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny_target()
    target.save_pretrained(folder / "target")
    fields = dict(sequential_head="state", head_rank=8, confidence_head=True, conv_kernel_size=2)
    drafter = tiny_drafter(target, target_name_or_path="org/target", dtype=torch.float32, **fields)
    learned(drafter).save_pretrained(folder / "drafter")
    torch.save(prompt(13), folder / "prompt.pt")
    expected = target.generate(prompt(13), max_new_tokens=20, do_sample=False)[0].tolist()
    (folder / "expected.json").write_text(json.dumps(expected))
    return folder


def run(hub, folder, home, code: str, token: str | None = "hf_token", **environment: str) -> dict:
    """What a process told of itself; the tokens of its generations are the target's own."""
    home.mkdir(exist_ok=True)
    environment = {**hub.environment(home, token), "PYTHONPATH": str(Path(__file__).parents[2]), **environment}
    asked = ["-c", SETUP + code + "\nprint('\\n' + json.dumps(told))", str(folder)]
    result = python(*asked, env=environment, cwd=home)
    assert result.returncode == 0, result.stderr[-3000:]
    told = json.loads(result.stdout.splitlines()[-1])
    texts = told.pop("texts", [])
    assert all(text == json.loads((folder / "expected.json").read_text()) for text in texts)
    return told | {"count": len(texts)}


# Takes seconds: processes push to a server of the Hub and pull from it.
def test_push_and_pull(hub, folder, tmp_path):
    pushed = """
from hf_hyperdflash import HyperDFlashDrafter
drafter = HyperDFlashDrafter.from_pretrained(folder / "drafter", dtype="auto")
drafter.push_to_hub("org/name")
drafter.push_to_hub("org/secret", private=True, tags=["mine"])
told["commit"] = drafter.push_to_hub("org/name").oid  # nothing new
drafter.norm.weight.data *= 1.5
drafter.push_to_hub("org/name", revision="next", commit_message="Another")
drafter.save_pretrained(folder / "saved", push_to_hub=True, repo_id="org/saved", private=True)
from huggingface_hub import HfApi
HfApi().upload_folder(repo_id="org/saved", folder_path=folder / "drafter", path_in_repo="inner")
"""
    told = run(hub, folder, tmp_path, pushed)
    files = hub.files("org/name")
    assert set(files) == WHOLE | {".gitattributes"}
    _, last = hub.repos["org/name"].branches["main"]
    assert told["commit"] == last.sha and last.title == "Upload HyperDFlash drafter"
    assert len(files["model.safetensors"]) < 1.1 * (folder / "drafter" / "model.safetensors").stat().st_size
    head = files["model.safetensors"][:20_000]
    assert b"embed" not in head and b"lm_head" not in head
    assert b"org/target" in files["README.md"] and b"custom_generate" in files["README.md"]
    assert hub.repos["org/secret"].private and not hub.repos["org/name"].private
    assert b"- mine" in hub.files("org/secret")["README.md"]
    assert hub.repos["org/name"].find("next").title == "Another"
    assert {name for name in hub.files("org/saved") if not name.startswith("inner/")} == set(files)

    pulled = """
from hf_hyperdflash import HyperDFlashDrafter
told["texts"] = []
for name, options in (
    ("org/name", {}), ("org/name", {"revision": "next"}), ("org/secret", {}), ("org/saved", {}),
    ("org/saved", {"subfolder": "inner"}),
):
    drafter, model = HyperDFlashDrafter.from_pretrained(name, dtype=torch.float32, **options), target()
    drafter.bind(model)
    told["texts"].append(written(model, assistant_model=drafter))
    assert drafter.last_stats.rounds
"""
    assert run(hub, folder, tmp_path / "empty", pulled)["count"] == 5
    hub.requests.clear()
    assert run(hub, folder, tmp_path / "empty", pulled, HF_HUB_OFFLINE="1")["count"] == 5
    assert not hub.requests


@pytest.mark.nightly  # a process without the package, against a server of the Hub
def test_without_the_package(hub, folder, tmp_path):
    run(hub, folder, tmp_path, """
from hf_hyperdflash import HyperDFlashDrafter
HyperDFlashDrafter.from_pretrained(folder / "drafter", dtype="auto").push_to_hub("org/name", private=True)
""")  # fmt: skip
    told = run(hub, folder, tmp_path / "bare home", """
from tests.helpers.saved_folder import Refusing
sys.meta_path.insert(0, Refusing())
from transformers import AutoModel
model, recipe = target(), {"custom_generate": "org/name", "trust_remote_code": True}
told["texts"] = [written(model, **recipe)]
drafter = AutoModel.from_pretrained("org/name", trust_remote_code=True, dtype=torch.float32)
drafter.bind(model)
told["texts"] += [written(model, assistant_model=drafter), written(model, **recipe)]
drafter.unbind(model)
drafter.save_pretrained(folder / "again")  # as any model of remote code, and from there once more
again = AutoModel.from_pretrained(folder / "again", trust_remote_code=True, dtype=torch.float32)
again.bind(model)
told["texts"].append(written(model, assistant_model=again))
told["refused"] = failure(lambda: written(target(), custom_generate="org/name"))
told["package"] = "hf_hyperdflash" in sys.modules
""")  # fmt: skip
    assert told["count"] == 4 and "trust_remote_code" in told["refused"] and not told["package"]


def litter(folder: Path, secret: Path) -> None:
    """What may lie in a drafter's folder, or be linked into it, that is nobody else's business."""
    secret.write_text("secret")
    for name in ("secrets.py", "notes.md", "other.safetensors", "custom_generate/more.py", ".env", "data.jsonl"):
        (folder / name).write_text("secret")
    for name in ("README.md", "training.json", "acceptance.png", "blocks.py", "model-00001-of-00001.safetensors"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(secret)


def test_what_a_folder_has_of_ours(folder, tmp_path):
    shutil.copytree(folder / "drafter", tmp_path / "drafter")
    for name in ("README.md", "training.json", "acceptance.png"):
        (tmp_path / "drafter" / name).write_text("ours")
    assert set(drafter_files(tmp_path / "drafter")) == WHOLE | {"training.json", "acceptance.png"}
    litter(tmp_path / "drafter", tmp_path / "elsewhere")
    assert set(drafter_files(tmp_path / "drafter")) == WHOLE - {"README.md", "blocks.py"}
    shutil.move(tmp_path / "drafter" / "custom_generate", tmp_path / "recipe")
    (tmp_path / "drafter" / "custom_generate").symlink_to(tmp_path / "recipe")
    assert "custom_generate/generate.py" not in drafter_files(tmp_path / "drafter")
    HyperDFlashDrafter.from_pretrained(folder / "drafter").save_pretrained(tmp_path / "sharded", max_shard_size=8000)
    (tmp_path / "sharded" / "model.safetensors").touch()
    shards = {path.name for path in (tmp_path / "sharded").glob("model-*.safetensors")}
    assert len(shards) > 2
    index = {"model.safetensors.index.json"}
    assert set(drafter_files(tmp_path / "sharded")) == WHOLE - {"model.safetensors"} | shards | index
    assert drafter_files(tmp_path / "nothing") == []


@pytest.mark.parametrize("is_own", [False, True])
def test_a_dry_run_says_what_a_push_would_upload(folder, tmp_path, monkeypatch, is_own):
    monkeypatch.setattr("hf_hyperdflash.hub.publish.HfApi", lambda **_: pytest.fail("the Hub was asked"))
    shutil.copytree(folder / "drafter", tmp_path / "drafter")
    (tmp_path / "drafter" / "secrets.py").write_text("secret")
    if is_own:
        (tmp_path / "drafter" / "README.md").write_text("a card")
    more = ["--private", "--revision", "next", "--create-pr"] if is_own else []
    done = CliRunner().invoke(app, ["push", str(tmp_path / "drafter"), "org/name", "--dry-run", *more])
    assert done.exit_code == 0, done.exception
    told, *lines, total = done.stdout.splitlines()
    where = ", private if it is new, revision next, as a pull request" if is_own else ", revision main, in one commit"
    assert told == f"Nothing was uploaded. To org/name{where}, would go"
    sizes = {line.split()[1]: int(line.split()[0].replace(",", "")) for line in lines}
    assert set(sizes) == WHOLE and total.split() == [f"{sum(sizes.values()):,}", "bytes"]
    assert sizes["model.safetensors"] == (folder / "drafter" / "model.safetensors").stat().st_size
    (card,) = (line for line in lines if "README.md" in line)
    assert ("(the folder's own)" if is_own else "(a new one; where the repository has a card, that stays)") in card
    assert (sizes["README.md"] == len("a card")) is is_own


@pytest.mark.parametrize(("revision", "branches"), [(None, []), ("next", ["next"]), ("refs/pr/1", [])])
def test_a_push_is_one_commit_of_what_is_ours(folder, monkeypatch, revision, branches):
    """Whatever the Hub answers: here nothing leaves this process. A card that the repository has stays."""
    made, uploaded = [], []

    class Api:
        def __init__(self, token):
            assert token == "hf_token"

        def create_repo(self, repo_id, private, exist_ok):
            assert (repo_id, private, exist_ok) == ("org/name", True, True)
            return SimpleNamespace(repo_id=repo_id)

        def create_branch(self, repo_id, branch, exist_ok):
            made.append(branch)
            assert repo_id == "org/name" and exist_ok

        def file_exists(self, repo_id, filename, revision):
            return (repo_id, filename, revision) == ("org/name", "README.md", "next")

        def upload_folder(self, *, folder_path, allow_patterns, **options):
            assert not uploaded and all(Path(folder_path, name).is_file() for name in allow_patterns)
            uploaded.append((set(allow_patterns), options))
            return SimpleNamespace(commit_url="https://hub/org/name/commit/1")

    monkeypatch.setattr("hf_hyperdflash.hub.publish.HfApi", Api)
    asked = ["--private", "--create-pr", "--token", "hf_token", *(["--revision", revision] if revision else [])]
    done = CliRunner().invoke(app, ["push", str(folder / "drafter"), "org/name", *asked])
    assert done.stdout.endswith("https://hub/org/name/commit/1\n") and made == branches
    ((names, options),) = uploaded
    assert names == WHOLE - ({"README.md"} if revision == "next" else set())
    about = {"commit_message": "Upload HyperDFlash drafter", "commit_description": None}
    assert options == {"repo_id": "org/name", "revision": revision, "create_pr": True, **about}


def test_a_drafter_of_another_kind_is_pushed_with_its_code():
    drafter = DeepseekV4MTPDrafter(tiny_config())
    told = planned_push(drafter, "org/mtp")
    assert all(f"  {name}" in told for name in (*code_of(drafter), "config.json", "model.safetensors", "README.md"))


def test_a_push_without_network_is_one_line(folder, tmp_path):
    environment = {
        **os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_x",
        "HF_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    code = "from hf_hyperdflash.cli.app import run; run()"
    result = python("-c", code, "push", folder / "drafter", "org/name", env=environment, cwd=tmp_path)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    (told,) = (line for line in result.stderr.splitlines() if line.startswith("Error: "))
    assert "org/name" in told and "not reached" in told


def test_trainer_and_adapters(hub, folder, tmp_path):
    code = """
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from hf_hyperdflash import HyperDFlashDrafter, HyperDFlashTrainer, HyperDFlashTrainingArguments
rows = Dataset.from_list([{"input_ids": list(range(2, 40)), "loss_mask": [False] * 8 + [True] * 30}] * 4)
def trained(drafter, name, is_pushed=True):
    args = HyperDFlashTrainingArguments(
        str(folder / name), max_steps=2, save_strategy="steps", save_steps=1, num_anchors=2, report_to=[],
        use_cpu=True,
        push_to_hub=is_pushed, hub_model_id="org/" + name, feature_source="cached", disable_tqdm=True,
    )
    trainer = HyperDFlashTrainer(drafter, target(), args, train_dataset=rows)
    trainer.train()
    trainer.push_to_hub()
    return drafter
(folder / "trained").mkdir()
for name in ("secrets.py", "other.safetensors", "notes.md"):
    (folder / "trained" / name).write_text("secret")
drafter = trained(HyperDFlashDrafter.from_pretrained(folder / "drafter", dtype=torch.float32), "trained")
trained(drafter, "late", is_pushed=False)  # but at the end
adapted = get_peft_model(drafter, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
trained(adapted, "adapter")
adapted.push_to_hub("org/adapter-alone")
base, model = HyperDFlashDrafter.from_pretrained("org/trained", dtype=torch.float32), target()
base.bind(model)
wrapped = PeftModel.from_pretrained(base, "org/adapter-alone").eval()
told["texts"] = [written(model, assistant_model=wrapped)]
told["same"] = all(torch.equal(v, adapted.state_dict()[k]) for k, v in wrapped.state_dict().items() if "lora" in k)
"""
    assert run(hub, folder, tmp_path, code) == {"count": 1, "same": True}
    assert set(hub.files("org/trained")) == WHOLE | {".gitattributes", "training.json"}
    titles = [commit.title for commit in hub.repos["org/trained"].branches["main"]]
    assert any("step 1" in title for title in titles) and titles[-1] == "End of training"
    alone = {".gitattributes", "README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert set(hub.files("org/adapter")) == alone | {"training.json"}
    assert set(hub.files("org/adapter-alone")) == alone
    assert set(hub.files("org/late")) == set(hub.files("org/trained"))


def test_an_adapter_is_pushed_and_pulled_alone(hub, folder, tmp_path):
    code = """
from peft import LoraConfig
from hf_hyperdflash import load_drafter
drafter, model = load_drafter(folder / "drafter"), target()
for name in ("chat", "code"):
    drafter.add_adapter(LoraConfig(r=2, init_lora_weights=False), name)
drafter.push_to_hub("org/code", private=True, tags=["mine"])
drafter.disable_adapters()
drafter.push_to_hub("org/base")
again = load_drafter("org/base")
again.load_adapter("org/code", "code")
again.bind(model)
told["texts"] = [written(model, assistant_model=again, adapter="code")]
ours = drafter._lora_tensors("code")
told["same"] = all(torch.equal(value, ours[key]) for key, value in again._lora_tensors("code").items())
told["none"] = failure(again.load_adapter, "org/none", "none")
"""
    told = run(hub, folder, tmp_path, code)
    assert told.pop("none").startswith("OSError: org/none has no adapter_config.json")
    assert told == {"count": 1, "same": True}
    alone = {".gitattributes", "README.md", "adapter_config.json", "adapter_model.safetensors"}
    files = hub.files("org/code")
    assert set(files) == alone and hub.repos["org/code"].private
    assert hub.repos["org/code"].branches["main"][-1].title == "Upload LoRA adapter of a drafter"
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "drafter"  # without its folders
    card = files["README.md"].decode()
    assert "- mine" in card and 'load_adapter("org/code", "code")' in card and "rank 2" in card
    assert set(hub.files("org/base")) == WHOLE | {".gitattributes"}
    assert b"lora" not in hub.files("org/base")["model.safetensors"][:20_000]


def test_a_sharded_drafter_is_saved_under_its_own_name(tmp_path):
    """FSDP2's `fully_shard` replaces the class by a subclass that torch defines."""
    drafter = tiny_drafter(tiny_target())
    of_torch = {"__module__": "torch.nn.functional"}
    drafter.__class__ = type("FSDPHyperDFlashDrafter", (FSDPModule, HyperDFlashDrafter), of_torch)
    drafter.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["auto_map"]["AutoModel"] == "modeling_hyperdflash.HyperDFlashDrafter"
    assert config["architectures"] == ["HyperDFlashDrafter"] and config["hyperdflash_version"] == __version__
    assert {path.name for path in tmp_path.glob("*.py")} == {name for name in CODE if "/" not in name}


def test_a_native_block_comes_from_the_commit_that_its_target_does(hub, folder, tmp_path):
    told = run(hub, folder, tmp_path, """
from huggingface_hub import HfApi
from safetensors.torch import save_file
from hf_hyperdflash import DeepseekV4MTPDrafter
loaded, commits = target(), []
drafter = DeepseekV4MTPDrafter(loaded.config)
HfApi().create_repo("org/native")
for value in (1.0, 2.0):
    drafter.norm.weight.data.fill_(value)
    loaded.config.save_pretrained(folder / "native")
    tensors = {name: tensor.clone() for name, tensor in drafter.deepseek_state_dict().items()}
    save_file(tensors, folder / "native" / "model.safetensors")
    commits.append(HfApi().upload_folder(repo_id="org/native", folder_path=folder / "native").oid)
loaded.config._name_or_path = "org/native"
told["norms"] = []
for commit in (commits[0], None):
    loaded.config._commit_hash = commit
    told["norms"].append(DeepseekV4MTPDrafter.from_target(loaded).norm.weight[0].item())
""")  # fmt: skip
    assert told["norms"] == [1.0, 2.0]


# What is read of a private repository, of a revision or folder of it


def sum_of(model) -> list:
    return [type(model).__name__, pytest.approx(sum(each.double().sum().item() for each in model.parameters()))]


def of_folder(folder: Path, inside: str = "") -> dict[str, bytes]:
    return {f"{inside}{path.name}": path.read_bytes() for path in folder.iterdir() if path.is_file()}


def private(hub, files: dict[str, bytes], branch: str = "main") -> None:
    repo = hub.repos.setdefault("org/name", Repo("org/name", private=True))
    repo.commit("main", "nothing", {"README.md": b"Nothing here."})
    repo.commit(branch, "all", files)


def test_a_target_is_read_where_it_is_said_to_be(hub, folder, tmp_path):
    """All of it: whether it is a target, its configuration and its weights."""
    target, _ = written("z-lab", tmp_path / "drafter")
    target.save_pretrained(tmp_path / "target")
    private(hub, of_folder(tmp_path / "target", "inner/"), "v2")
    told = run(hub, folder, tmp_path, """
from hf_hyperdflash import load_target
place = dict(token="hf_token", revision="v2", subfolder="inner", cache_dir="elsewhere")
for option in ("token", "revision", "subfolder"):
    told[option] = failure(load_target, "org/name", **{k: v for k, v in place.items() if k != option})
told["loaded"] = sum_of(load_target("org/name", **place))
told["again"] = sum_of(load_target("org/name", **place | {"local_files_only": True}))
told["cache_dir"] = failure(load_target, "org/name", **place | {"cache_dir": "nowhere", "local_files_only": True})
""", token=None)  # fmt: skip
    assert told["loaded"] == told["again"] == sum_of(target)
    assert not list((tmp_path / "hub").glob("models--*/snapshots"))  # the cache that was not named
    for option in ("token", "revision", "subfolder", "cache_dir"):
        assert told[option].startswith("OSError: ") and "org/name" in told[option] and "\n" not in told[option]
    assert "`revision` 'v2', `subfolder` 'inner'" in told["token"]


@pytest.mark.parametrize("kind", mostly_nightly([*KINDS, *UNROLLED], kept=2))
def test_of_a_repository_of_drafters_the_one_that_is_asked_for_is_downloaded(hub, folder, tmp_path, kind):
    """In a folder, and the one outside of all."""
    saved, files = {}, {}
    for inner, one in (("", "z-lab"), ("full/", kind), ("full/old/", kind), ("other/", "speculators")):
        _, saved[inner] = written(one, tmp_path / "saved" / inner)
        files |= of_folder(tmp_path / "saved" / inner, inner)
    private(hub, files)
    told = run(hub, folder, tmp_path, """
from hf_hyperdflash import load_drafter
told["loaded"] = sum_of(load_drafter("org/name", subfolder="full", token="hf_token", dtype="float32"))
told["wrong"] = failure(load_drafter, "org/name", subfolder="fall", token="hf_token")
told["outside"] = sum_of(load_drafter("org/name", token="hf_token"))
""", token=None)  # fmt: skip
    assert told["loaded"] == sum_of(saved["full/"]) and told["outside"] == sum_of(saved[""])
    assert "`subfolder` 'fall'" in told["wrong"] and "\n" not in told["wrong"]
    contents = [path.split("/resolve/")[-1] for method, path in hub.requests if method == "GET"]
    weights = {path.partition("/")[2] for path in contents if path.endswith((".safetensors", ".bin"))}
    assert weights == {"full/model.safetensors", "model.safetensors"}
