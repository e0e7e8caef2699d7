"""The Hugging Face source against a stand-in for `datasets`: what is asked of it, and every way it can fail."""

import sys
import types

import pytest

from jaxllm.data.hf import HF
from jaxllm.data.tokenizer import Bytes
from jaxllm.errors import UserError


class Rows:
    """As much of `datasets.Dataset` as is used."""

    def __init__(self, columns):
        self.columns, self.column_names = columns, list(columns)
        self.info = types.SimpleNamespace(version="1.0.0", download_checksums=None, dataset_size=10)
        self.cache_files = [{"filename": "cache-1.arrow"}]

    def __len__(self):
        return len(self.columns["text"])

    def __getitem__(self, index):
        return {k: v[index] for k, v in self.columns.items()}

    def select_columns(self, names):
        return Rows({k: self.columns[k] for k in names})


@pytest.fixture
def library(monkeypatch):
    fake = types.ModuleType("datasets")
    fake.__version__, fake.calls = "9.9", []
    fake.rows = Rows({"text": [f"row {i}" for i in range(2500)], "n": list(range(2500))})

    def load_dataset(*arguments, **options):
        fake.calls.append((arguments, options))
        return fake.rows

    fake.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return fake


def prepared(folder, **fields):
    source = HF(**({"name": "some/set", "tokenizer": Bytes(), "val_every": 0} | fields), cache_dir="cache")
    return source.prepare(base=folder)


def texts(corpus):
    return [corpus.tokenizer.decode(corpus.train.document(i)) for i in range(len(corpus.train))]


def test_rows_become_documents(library, tmp_path):
    corpus = prepared(tmp_path, subset="en", split="train", revision="abc")
    assert texts(corpus) == [f"row {i}" for i in range(2500)]
    assert library.calls == [(("some/set", "en"), {"split": "train", "revision": "abc", "data_files": None})]
    assert corpus.facts["rows"] == 2500 and corpus.facts["datasets"] == "9.9"
    assert len(texts(prepared(tmp_path, max_documents=1001))) == 1001


def test_new_data_is_seen(library, tmp_path):
    prepared(tmp_path)
    library.rows = Rows({"text": ["other"] * 2500})
    library.rows.cache_files = [{"filename": "cache-2.arrow"}]
    assert texts(prepared(tmp_path))[0] == "other"


def test_local_files_and_folders_start_at_the_base(library, tmp_path):
    (tmp_path / "mine.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    prepared(tmp_path, name="json", data_files="mine.json")
    prepared(tmp_path, name="folder")
    prepared(tmp_path, data_files="inside/the/repo.json")
    assert library.calls[0][1]["data_files"] == str(tmp_path / "mine.json")
    assert library.calls[1][0][0] == str(tmp_path / "folder")
    assert library.calls[2][1]["data_files"] == "inside/the/repo.json"


def test_without_the_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="needs the package datasets: pip install"):
        prepared(tmp_path)


def test_faults_are_one_line(library, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="data.text_key='body': some/set has the columns text, n"):
        prepared(tmp_path, text_key="body")
    with pytest.raises(UserError, match="row 0 of some/set holds int, not text"):
        prepared(tmp_path, text_key="n")

    def offline(*_, **__):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(library, "load_dataset", offline)
    with pytest.raises(UserError, match="some/set: datasets cannot load it .ConnectionError: no route to the hub"):
        prepared(tmp_path)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"name": ""}, "data.name=''"),
        ({"name": "a", "split": ""}, "data.split=''"),
        ({"name": "a", "max_documents": 0}, "data.max_documents=0"),
        ({"name": "a", "subset": 3}, "data.subset=3"),
    ],
)
def test_mistakes_in_the_fields(fields, message):
    with pytest.raises(UserError, match=message):
        HF(**fields)
