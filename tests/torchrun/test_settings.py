"""The parameters that --rdzv-conf accepts."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from elasticd.torchrun.settings import Settings, settings_from


def settings(endpoint: str = "etcd:2379", run_id: str = "job", **conf: object) -> Settings:
    return settings_from(RendezvousParameters("etcd-v3", endpoint, run_id, 1, 4, **conf))


def test_defaults_are_torchs_where_torch_has_them_and_no_last_call() -> None:
    plain = settings(timeout=900)  # torchrun itself adds these
    assert (plain.join_timeout_s, plain.close_timeout_s, plain.silence_s) == (600, 30, 60)
    assert (plain.ttl_s, plain.rules.last_call_s, plain.rules.max_nodes) == (5, None, 4)


def test_values_come_as_text() -> None:
    given = settings(
        join_timeout="50", last_call_timeout="60", close_timeout="70", read_timeout="8", settle_s="0"
    )
    assert (given.join_timeout_s, given.close_timeout_s, given.silence_s) == (50, 70, 8)
    assert (given.rules.last_call_s, given.rules.settle_s) == (60, 0)


def test_an_older_name_of_the_join_timeout_counts() -> None:
    assert settings(timeout="120").join_timeout_s == 120


def test_torchs_way_to_give_a_lease() -> None:
    assert settings(keep_alive_interval="2").ttl_s == 6
    assert settings(keep_alive_interval=2, keep_alive_max_attempt=5).ttl_s == 10


def test_tls_files_make_it_https(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("cacert", "cert", "key")}
    for file in files.values():
        file.write_text("pem")
    access = settings("a:1,b", **{name: str(path) for name, path in files.items()}).access
    assert (access.tls, access.endpoints, access.cert) == (True, ("a:1", "b:2379"), files["cert"])
    v2_names = settings("a", protocol="https", ca_cert=str(files["cacert"])).access
    assert v2_names.cacert == files["cacert"]


@pytest.mark.parametrize(
    ("conf", "says"),
    [
        ({"join_timout": 5}, "does not know the --rdzv-conf key join_timout"),
        ({"ttl": "soon"}, "ttl is 'soon'; give a number"),
        ({"join_timeout": 0}, "join_timeout is 0; give a number above 0"),
        ({"ttl": 1}, "leases last at least 2 s"),
        ({"ttl": 5, "keep_alive_interval": 2}, "give one"),
        ({"protocol": "ftp"}, "http or https"),
        ({"cacert": "/nowhere"}, "does not exist"),
        ({"cert": "a", "ssl_cert": "b"}, "both cert and ssl_cert"),
        ({"endpoint": ""}, "--rdzv-endpoint"),
        ({"run_id": "none"}, "--rdzv-id"),
        ({"run_id": ""}, "--rdzv-id"),
    ],
)
def test_each_wrong_setting_is_an_error_of_one_sentence(conf: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        settings(**conf)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)
