"""The file of API keys, and the sessions of browsers."""

from __future__ import annotations

import gc
import hashlib
from pathlib import Path

import pytest

from moonpool.conductor.access.gate import Gate
from moonpool.conductor.access.keys import ApiKeys
from moonpool.conductor.access.roles import EVERYBODY, Principal
from moonpool.conductor.access.sessions import LASTS_S, Sessions
from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.security import certificates, process
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import Caller

FILE = f"""
keys = ["sk-plain"]
read_keys = ["sk-watch"]
admin_keys = ["sk-ops"]
[acme]
keys = ["sk-1", "sha256:{hashlib.sha256(b"sk-2").hexdigest()}"]
read_keys = ["sk-page"]
weight = 2
max_requests = 3
cached_nbytes = "2GiB"
[nightly]
keys = ["sk-3"]
class = "batch"
"""


def load(tmp_path: Path, text: str) -> ApiKeys:
    file = tmp_path / "tenants.toml"
    file.write_text(text)
    return ApiKeys.load(str(file), b"s" * 32)


def of(keys: ApiKeys, key: str) -> Principal | None:
    return keys.get(keys.id_of(key))


def test_without_a_file_everybody_may_do_everything() -> None:
    keys = ApiKeys.load("")
    assert not keys.are_configured
    assert of(keys, "") is EVERYBODY


def test_a_key_has_one_role_and_one_scope(tmp_path: Path) -> None:
    keys = load(tmp_path, FILE)
    found = {name: of(keys, f"sk-{name}") for name in ("plain", "watch", "ops", "1", "2", "page", "3")}
    told = {name: one and (one.role, one.scope) for name, one in found.items()}
    assert told == {
        "plain": ("inference", ""),
        "watch": ("read", None),
        "ops": ("admin", None),
        "1": ("inference", "acme"),
        "2": ("inference", "acme"),
        "page": ("read", "acme"),
        "3": ("inference", "nightly"),
    }
    assert found["1"] is not None and found["3"] is not None
    acme = found["1"].client
    assert (acme.name, acme.weight, acme.max_requests, acme.cached_nbytes) == ("acme", 2.0, 3, 2 << 30)
    assert found["3"].client.service_class == "batch"
    for wrong in ("", "sk-4", f"sha256:{hashlib.sha256(b'sk-2').hexdigest()}", "SK-1"):
        assert of(keys, wrong) is None


def test_no_key_and_no_digest_of_one_stays_in_memory(tmp_path: Path) -> None:
    keys = load(tmp_path, FILE)
    gc.collect()
    assert "sk-" not in repr(vars(keys))
    kept = b"".join(keys._principals)
    assert hashlib.sha256(b"sk-2").digest()[:16] not in kept
    other = ApiKeys.load(str(tmp_path / "tenants.toml"), b"t" * 32)
    assert not keys._principals.keys() & other._principals.keys(), "digests are the cluster's own"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[a]\nkeys=["1"]\nwieght=2', "a.wieght: unknown; known are keys, read_keys, weight"),
        ('[a]\nkeys=["1"]\nweight=0', "a.weight.*got 0"),
        ('[a]\nkeys="sk-1"', "a.keys: Input should be a valid list$"),
        ('read_keys="sk-1"', "read_keys: Input should be a valid list$"),
        ('read_key=["sk-1"]', "read_key: Input should be a valid dictionary[^1]*$"),
        ('[""]\nkeys=["sk-1"]', "at least 1 character"),
        ("[a]\nkeys=[]", "no tenant has a key"),
        ('[a]\nkeys=["1"]\n[b]\nkeys=["1"]', "tenant 'a' has one of these keys too"),
        ('admin_keys=["1"]\n[b]\nkeys=["1"]', "the cluster has one of these keys too, for the role admin"),
        ('[a]\nkeys=["sha256:12"]', "64 hexadecimal digits"),
        ('[a]\nkeys=["1"]\ncached_nbytes="2 apples"', "a.cached_nbytes"),
        ('[a]\nkeys=["1"]\nslo_ttft_s=-1.0', "a.slo_ttft_s.*greater than or equal to 0, got -1"),
        ('[a]\nkeys=["1"]\nslo_tbt_s=inf', "a.slo_tbt_s.*finite"),
        ("[a", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        load(tmp_path, text)
    assert "sk-1" not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeys.load(str(tmp_path / "nothing"))


def test_a_session_ends_with_its_time_and_is_valid_at_every_conductor() -> None:
    now_s = 1e9
    one, two = Sessions(b"s" * 32, lambda: now_s), Sessions(b"s" * 32, lambda: now_s)
    cookie = one.begin(b"k" * 16)
    assert two.key_of(cookie) == b"k" * 16
    assert Sessions(b"t" * 32, lambda: now_s).key_of(cookie) is None, "another cluster's"
    now_s += LASTS_S - 1
    assert two.key_of(cookie) == b"k" * 16
    now_s += 1
    assert two.key_of(cookie) is None


def test_a_cookie_cannot_be_changed_or_made_up() -> None:
    sessions = Sessions(b"s" * 32)
    cookie = sessions.begin(b"k" * 16)
    for at in range(len(cookie)):
        changed = cookie[:at] + ("A" if cookie[at] != "A" else "B") + cookie[at + 1 :]
        assert sessions.key_of(changed) is None
    for wrong in ("", "A", "é", cookie[:-4], cookie + "AAAA", "=" * 4000, "\0"):
        assert sessions.key_of(wrong) is None


def test_certificates_alone_are_not_enough_for_tenants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each conductor would derive roots of its own, and find nothing that another has cached."""
    (tmp_path / "tenants.toml").write_text(FILE)
    certificates.init(tmp_path, days=1)
    cert = certificates.issue(tmp_path, Caller("conductor", "c"), days=1)
    options = SecurityOptions(cert=str(cert), key=str(cert.with_suffix(".key")), ca=str(tmp_path / "ca.pem"))
    monkeypatch.setattr(process, "_current", Security(options, Caller("conductor", "c")))
    with pytest.raises(ConfigError, match=r"conductor\.tenants_path needs security\.cluster_key"):
        Gate.load(str(tmp_path / "tenants.toml"))
    assert not Gate.load("").keys.are_configured
