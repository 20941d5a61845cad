"""Folders in the user's cache: where they are, and that nobody else can write to them."""

import os
import stat

import pytest

from podscale.storage.user_cache import get_user_cache, make_private_folder


def test_the_folder_is_in_xdg_cache_home_or_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert get_user_cache("index") == tmp_path / ".cache" / "podscale" / "index"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert get_user_cache("index") == tmp_path / "caches" / "podscale" / "index"


def test_a_new_folder_is_for_its_owner_alone(tmp_path):
    make_private_folder(tmp_path / "podscale" / "programs")
    assert stat.S_IMODE((tmp_path / "podscale" / "programs").stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707])
@pytest.mark.parametrize("name", ["podscale/programs", "podscale"])
def test_a_folder_that_others_can_write_to_or_replace_is_refused(tmp_path, mode, name):
    make_private_folder(tmp_path / "podscale" / "programs")
    (tmp_path / name).chmod(mode)
    with pytest.raises(PermissionError, match=f"other users can write to .*{name}"):
        make_private_folder(tmp_path / "podscale" / "programs")


def test_a_folder_for_data_may_be_in_one_that_others_can_write_to_as_an_emptydir_is(tmp_path):
    tmp_path.chmod(0o777)
    make_private_folder(tmp_path / "podscale" / "data", check_parents=False)
    (tmp_path / "podscale" / "data").chmod(0o770)
    with pytest.raises(PermissionError, match=r"other users can write to .*data"):
        make_private_folder(tmp_path / "podscale" / "data", check_parents=False)


def test_a_link_to_a_folder_that_others_can_write_to_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "programs").symlink_to(tmp_path / "open")
    with pytest.raises(PermissionError, match="other users can write to"):
        make_private_folder(tmp_path / "programs")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused(tmp_path):
    (tmp_path / "programs").mkdir(mode=0o755)
    os.chown(tmp_path / "programs", 12345, 12345)
    with pytest.raises(PermissionError, match="other users can write to"):
        make_private_folder(tmp_path / "programs")


def test_a_user_without_a_home_has_a_cache_outside_the_working_folder(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for home in ("", "not/absolute"):
        monkeypatch.setenv("HOME", home)
        assert get_user_cache("index").is_absolute()
