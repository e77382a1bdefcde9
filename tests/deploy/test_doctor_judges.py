"""What the doctor makes of facts: each bad case one clear sentence, and what to do."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from elasticd.cli.doctor import judge
from elasticd.cli.doctor.doctor_command import as_object, as_text, exit_code
from elasticd.cli.doctor.facts import (
    AddressFacts,
    DriverFacts,
    GpuFacts,
    HttpFacts,
    ImportFacts,
    Interface,
    LimitFacts,
    MemoryFacts,
    Missing,
    NetworkFacts,
    PeerFacts,
    PortFacts,
    TorchFacts,
)
from elasticd.cli.doctor.judge import GIB, MIB, Finding, Grade
from elasticd.etcd.embedded import fault_of
from elasticd.etcd.examine import Certificate, Endpoint, Examined

DAY = 86400.0
NOW = 1_000 * DAY


def worst(findings: Iterable[Finding]) -> Finding:
    """The one to see; every finding has a sentence, and what is not fine says what to do."""
    found = list(findings)
    for finding in found:
        assert finding.says and "\n" not in finding.says and not finding.says.endswith(".")
        assert bool(finding.do) == (finding.grade is not Grade.FINE)
    return max(found, key=lambda f: list(Grade).index(f.grade))


def endpoint(
    name: str = "e:2379",
    *,
    version: str = "3.6.12",
    writes_s: float = 0.002,
    ahead_s: tuple[float, float] | None = (-0.1, 0.1),
    certificate: Certificate | None = None,
) -> Endpoint:
    return Endpoint(
        name,
        version=version,
        reads_s=(0.001,) * 20,
        writes_s=(0.002,) * 19 + (writes_s,),
        ahead_s=ahead_s,
        certificate=certificate,
    )


def examined(
    *endpoints: Endpoint, certificates: tuple[Certificate, ...] = (), open_key: str = ""
) -> Examined:
    return Examined("https://e:2379", endpoints, certificates, open_key)


# ---------------------------------------------------------------- etcd


def test_an_etcd_that_answers_fast_is_fine() -> None:
    finding = worst(judge.etcd(examined(endpoint()), 5.0))
    assert finding.grade is Grade.FINE
    assert finding.says == (
        "the endpoint answers; writes take 2.0 ms (99 %: 2.0 ms), reads 1.0 ms (99 %: 1.0 ms)"
    )


def test_an_etcd_that_is_away_may_come_right_and_a_wrong_certificate_not() -> None:
    away = worst(judge.etcd(examined(Endpoint("e:1", "nothing listens at e:1", unreachable=True)), 5.0))
    assert (away.grade, away.later, away.says) == (Grade.WRONG, True, "nothing listens at e:1")
    refused = worst(
        judge.etcd(
            examined(Endpoint("e:1", "nothing listens at e:1", unreachable=True), Endpoint("f:1", "denied")),
            5.0,
        )
    )
    assert (refused.grade, refused.later, refused.says) == (Grade.WRONG, False, "denied")


def test_an_endpoint_of_several_that_is_away_is_worth_knowing() -> None:
    away = Endpoint("f:1", "nothing listens at f:1", unreachable=True)
    finding = worst(judge.etcd(examined(endpoint(), away, endpoint("g:1")), 5.0))
    assert finding.grade is Grade.ADVICE
    assert finding.says == "2 of 3 endpoints answer: nothing listens at f:1"


@pytest.mark.parametrize(
    ("writes_s", "ttl_s", "grade"),
    [
        (0.05, 5.0, Grade.FINE),
        (0.3, 5.0, Grade.ADVICE),
        (1.2, 5.0, Grade.WRONG),
        (1.2, 30.0, Grade.ADVICE),
    ],
)
def test_the_slowest_write_is_held_against_the_lease(writes_s: float, ttl_s: float, grade: Grade) -> None:
    assert worst(judge.etcd(examined(endpoint(writes_s=writes_s)), ttl_s)).grade is grade


@pytest.mark.parametrize(
    ("version", "grade"),
    [
        ("3.5.1", Grade.ADVICE),
        ("3.5.29", Grade.ADVICE),
        ("3.5.30", Grade.FINE),
        ("3.6.0", Grade.ADVICE),
        ("3.6.11", Grade.FINE),
        ("3.7.0", Grade.FINE),
        ("3.4.23", Grade.ADVICE),
        ("3.6.0-rc.1", Grade.ADVICE),
        ("", Grade.ADVICE),
    ],
)
def test_releases_with_known_faults_are_named(version: str, grade: Grade) -> None:
    assert worst(judge.etcd(examined(endpoint(version=version)), 5.0)).grade is grade


@pytest.mark.parametrize(
    ("ahead_s", "grade", "says"),
    [
        ((-0.2, 0.3), Grade.FINE, "agrees with etcd's to 0.3 s"),
        ((9.7, 10.2), Grade.ADVICE, "this machine's clock is 10 s behind that of etcd at e:2379"),
        ((-61.0, -60.0), Grade.WRONG, "this machine's clock is 60 s ahead of that of etcd at e:2379"),
    ],
)
def test_a_clock_that_is_not_etcds_is_said_to_be_ahead_or_behind(
    ahead_s: tuple[float, float], grade: Grade, says: str
) -> None:
    finding = worst(judge.clock(examined(endpoint(), endpoint(ahead_s=ahead_s))))
    assert (finding.grade, finding.says) == (grade, says)


def test_an_etcd_that_tells_no_time_is_not_judged_by_it() -> None:
    assert not list(judge.clock(examined(endpoint(ahead_s=None))))


@pytest.mark.parametrize(
    ("valid", "grade", "says"),
    [
        (
            (-10, 90),
            Grade.FINE,
            "in order; the first to expire, the client certificate c.pem, has 90 days left",
        ),
        ((-10, 3), Grade.ADVICE, "the client certificate c.pem expires in 3 days"),
        ((-10, -1), Grade.WRONG, "the client certificate c.pem expired 1 day ago"),
        ((2, 90), Grade.WRONG, "the client certificate c.pem is not valid for another 2 days"),
    ],
)
def test_certificates_are_judged_by_their_time(valid: tuple[int, int], grade: Grade, says: str) -> None:
    certificate = Certificate("the client certificate c.pem", NOW + valid[0] * DAY, NOW + valid[1] * DAY)
    finding = worst(judge.certificates(examined(certificates=(certificate,)), NOW))
    assert (finding.grade, finding.says) == (grade, says)


def test_a_servers_certificate_counts_too() -> None:
    soon = Certificate("the certificate of e:2379", NOW - DAY, NOW + 3600 * 5)
    finding = worst(judge.certificates(examined(endpoint(certificate=soon)), NOW))
    assert finding.says == "the certificate of e:2379 expires in 5 h"


def test_a_key_that_all_can_read_is_advised_against() -> None:
    finding = worst(judge.certificates(examined(open_key="/k.pem"), NOW))
    assert (finding.grade, finding.says) == (
        Grade.ADVICE,
        "anybody on this machine can read the key /k.pem",
    )


# ---------------------------------------------------------------- address, ports, network

REMOTE = AddressFacts("10.0.0.7", shared=True, etcd_is_local=False, loopback=False)
LOCAL = AddressFacts("127.0.0.1", shared=True, etcd_is_local=True, loopback=True)
LO = Interface("lo", up=True, loopback=True, addresses=("127.0.0.1",))
ETH = Interface("eth0", up=True, loopback=False, addresses=("10.0.0.7",))


@pytest.mark.parametrize(
    ("facts", "grade", "says"),
    [
        (REMOTE, Grade.FINE, "others reach this node at 10.0.0.7"),
        (LOCAL, Grade.FINE, "others reach this node at 127.0.0.1"),
        (
            AddressFacts("127.0.0.1", shared=True, etcd_is_local=False, loopback=True),
            Grade.WRONG,
            "other nodes would be told to reach this one at 127.0.0.1, which is each machine itself",
        ),
        (
            AddressFacts("10.9.9.9", True, False, False, "Cannot assign requested address"),
            Grade.WRONG,
            "one cannot listen on 10.9.9.9 and connect to it: Cannot assign requested address",
        ),
        (
            AddressFacts("10.0.0.7", True, False, False, peers=(PeerFacts("b", "10.0.0.8:31", "timed out"),)),
            Grade.WRONG,
            "node b of the job cannot be reached at 10.0.0.8:31 from here: timed out",
        ),
    ],
)
def test_addresses_are_such_that_others_can_reach_them(facts: AddressFacts, grade: Grade, says: str) -> None:
    finding = worst(judge.address(facts))
    assert (finding.grade, finding.says) == (grade, says)


@pytest.mark.parametrize(
    ("used", "grade"), [(100, Grade.FINE), (27_800, Grade.ADVICE), (28_232, Grade.WRONG)]
)
def test_free_ports_are_counted(used: int, grade: Grade) -> None:
    assert worst(judge.ports(PortFacts(32768, 60999, used))).grade is grade


@pytest.mark.parametrize(
    ("facts", "grade", "says"),
    [
        (HttpFacts("0.0.0.0:9408"), Grade.FINE, "metrics can be served at 0.0.0.0:9408"),
        (HttpFacts("h:1", "in use", agent=True), Grade.FINE, "an agent serves metrics at h:1"),
        (HttpFacts("h:1", "in use"), Grade.ADVICE, "metrics cannot be served at h:1: in use"),
    ],
)
def test_the_port_of_the_metrics_is_free_or_an_agents(facts: HttpFacts, grade: Grade, says: str) -> None:
    finding = worst(judge.http(facts))
    assert (finding.grade, finding.says) == (grade, says)


@pytest.mark.parametrize(
    ("facts", "own", "says"),
    [
        (NetworkFacts((LO, ETH), "h", ("10.0.0.7",)), REMOTE, "interfaces lo, eth0"),
        (NetworkFacts((LO, ETH), "h", ("127.0.1.1",)), LOCAL, "interfaces lo, eth0"),
        (
            NetworkFacts((LO, ETH), "h", ("127.0.1.1",)),
            REMOTE,
            "gloo would use loopback, as this machine's name h resolves to 127.0.1.1",
        ),
        (
            NetworkFacts((LO, ETH), "h", ()),
            REMOTE,
            "gloo would use loopback, as this machine's name h does not resolve",
        ),
        (
            NetworkFacts((LO, ETH), "h", (), gloo="eth0"),
            REMOTE,
            "interfaces lo, eth0; gloo uses eth0",
        ),
        (
            NetworkFacts((LO, ETH), "h", ("10.0.0.7",), gloo="eth"),
            REMOTE,
            "GLOO_SOCKET_IFNAME names eth, and there is no such interface",
        ),
        (NetworkFacts((LO, ETH), "h", ("10.0.0.7",), nccl="eth"), REMOTE, "interfaces lo, eth0"),
        (NetworkFacts((LO, ETH), "h", ("10.0.0.7",), nccl="^lo"), REMOTE, "interfaces lo, eth0"),
        (
            NetworkFacts((LO, ETH), "h", ("10.0.0.7",), nccl="=eth"),
            REMOTE,
            "NCCL_SOCKET_IFNAME names eth, and there is no such interface",
        ),
        (
            NetworkFacts((LO, Interface("ib0", False, False)), "h", ("10.0.0.7",), nccl="ib"),
            LOCAL,
            "NCCL_SOCKET_IFNAME names ib, which is down",
        ),
        (NetworkFacts((LO,), "h", ("10.0.0.7",)), REMOTE, "no interface but loopback is up"),
    ],
)
def test_interfaces_are_such_that_gloo_and_nccl_meet_others(
    facts: NetworkFacts, own: AddressFacts, says: str
) -> None:
    assert worst(judge.network(facts, own)).says == says


def test_who_is_told_that_gloo_would_use_loopback_is_told_of_the_address() -> None:
    finding = worst(judge.network(NetworkFacts((LO, ETH), "h", ()), REMOTE))
    assert finding.do.startswith("give --address an address of this machine")


# ---------------------------------------------------------------- memory and limits


@pytest.mark.parametrize(
    ("facts", "grade", "says"),
    [
        (MemoryFacts(8 * GIB, 8 * GIB), Grade.FINE, "8.0 GiB of 8.0 GiB are free in /dev/shm"),
        (
            MemoryFacts(64 * MIB, 64 * MIB),
            Grade.ADVICE,
            "64 MiB of 64 MiB are free in /dev/shm, which DataLoader workers soon fill",
        ),
        (MemoryFacts(8 * GIB, MIB), Grade.WRONG, "only 1 MiB of 8.0 GiB are free in /dev/shm"),
        (
            MemoryFacts(0, 0, "Read-only file system"),
            Grade.WRONG,
            "/dev/shm cannot be used: Read-only file system",
        ),
    ],
)
def test_shared_memory_is_large_enough(facts: MemoryFacts, grade: Grade, says: str) -> None:
    finding = worst(judge.shared_memory(facts))
    assert (finding.grade, finding.says) == (grade, says)


@pytest.mark.parametrize(
    ("facts", "grade"),
    [
        (LimitFacts(65536), Grade.FINE),
        (LimitFacts(2**63 - 1, 10_000, 40), Grade.FINE),
        (LimitFacts(1024), Grade.ADVICE),
        (LimitFacts(256), Grade.WRONG),
        (LimitFacts(65536, 300, 40), Grade.ADVICE),
    ],
)
def test_files_and_tasks_suffice(facts: LimitFacts, grade: Grade) -> None:
    assert worst(judge.limits(facts)).grade is grade


# ---------------------------------------------------------------- GPUs, torch, imports

H100 = GpuFacts("NVIDIA H100", 80 * GIB)
CPU_TORCH = TorchFacts("python", "2.13.0+cpu")
CUDA_TORCH = TorchFacts("python", "2.13.0", cuda="13.0", nccl_version="2.28.9", devices=2)


@pytest.mark.parametrize(
    ("driver", "torch", "grade", "says"),
    [
        (DriverFacts(0), CPU_TORCH, Grade.FINE, "there are none: workers train on the CPU"),
        (
            DriverFacts(2, "580.1", (H100, H100)),
            CUDA_TORCH,
            Grade.FINE,
            "2 (NVIDIA H100 with 80.0 GiB), driver 580.1, CUDA 13.0",
        ),
        (
            DriverFacts(2, error="its library libnvidia-ml.so.1 is not here"),
            CUDA_TORCH,
            Grade.WRONG,
            "2 are in /dev, but NVIDIA's driver does not answer: its library libnvidia-ml.so.1 is not here",
        ),
        (
            DriverFacts(1, "580.1", (H100,)),
            CPU_TORCH,
            Grade.WRONG,
            "there are 1, but torch 2.13.0+cpu was built without CUDA",
        ),
        (
            DriverFacts(1, "470.1", (H100,)),
            TorchFacts("python", "2.13.0", cuda="13.0", device_error="the driver is too old"),
            Grade.WRONG,
            "torch 2.13.0 (CUDA 13.0) cannot use them with driver 470.1: the driver is too old",
        ),
    ],
)
def test_gpus_are_those_that_workers_get(
    driver: DriverFacts, torch: TorchFacts, grade: Grade, says: str
) -> None:
    finding = worst(judge.gpus(driver, torch))
    assert (finding.grade, finding.says) == (grade, says)


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (CPU_TORCH, "torch 2.13.0+cpu forms groups with gloo"),
        (CUDA_TORCH, "torch 2.13.0 forms groups with gloo and NCCL 2.28.9"),
        (TorchFacts("python", error="No module"), "python cannot import it: No module"),
        (
            TorchFacts("python", "2.6.0+cu124"),
            "PyTorch 2.6.0+cu124 is too old for elasticd, which needs 2.8 or newer",
        ),
        (
            TorchFacts("python", "2.13.0", gloo="no address"),
            "a gloo group cannot be formed here: no address",
        ),
        (
            TorchFacts("python", "2.13.0", nccl="no device"),
            "a NCCL group cannot be formed here: no device",
        ),
    ],
)
def test_torch_is_said_to_form_groups_or_why_it_cannot(facts: TorchFacts, says: str) -> None:
    assert worst(judge.torch(facts)).says == says


def test_a_missing_import_is_wrong_unless_the_script_is_prepared_for_it() -> None:
    needed = Missing("einops", "job.py:3", "ModuleNotFoundError: No module named 'einops'")
    spare = Missing("apex", "job.py:5", "ModuleNotFoundError: No module named 'apex'", optional=True)
    found = worst(judge.imports(ImportFacts("job.py", 9, (needed, spare))))
    assert found.says == (
        "job.py:3 imports einops, which fails: ModuleNotFoundError: No module named 'einops'"
    )
    fine = worst(judge.imports(ImportFacts("job.py", 8, (spare,))))
    assert fine.says == "8 imports of job.py work; not there, but not always needed: apex"


# ---------------------------------------------------------------- the verdict

FINE = Finding("a", Grade.FINE, "well")
ADVICE = Finding("b", Grade.ADVICE, "so so", "mend")
WRONG = Finding("c", Grade.WRONG, "ill", "heal")
LATER = Finding("etcd", Grade.WRONG, "away", "wait", later=True)


@pytest.mark.parametrize(
    ("findings", "strict", "code"),
    [
        ((FINE, ADVICE), False, 0),
        ((FINE, ADVICE), True, 1),
        ((FINE, WRONG), False, 1),
        ((FINE, LATER), False, 4),
        ((WRONG, LATER), False, 1),
        ((ADVICE, LATER), True, 1),
    ],
)
def test_the_exit_code_says_whether_to_try_again(
    findings: tuple[Finding, ...], strict: bool, code: int
) -> None:
    assert exit_code(findings, strict) == code
    assert as_object(findings, strict)["exit_code"] == code


def test_people_are_told_what_to_do_and_programs_get_the_same() -> None:
    assert list(as_text((FINE, WRONG), strict=False)) == [
        "a  fine    well",
        "c  wrong   ill",
        "           -> heal",
        "",
        "This machine cannot run a job: 1 thing wrong.",
    ]
    assert as_object((WRONG,), strict=False)["findings"] == [
        {"check": "c", "grade": "wrong", "says": "ill", "do": "heal"}
    ]


@pytest.mark.parametrize(("percent", "value"), [(50, 2.0), (99, 4.0), (1, 1.0), (100, 4.0)])
def test_percentiles_are_values_that_were_seen(percent: float, value: float) -> None:
    assert judge.percentile([3.0, 1.0, 4.0, 2.0], percent) == value


def test_the_etcd_of_standalone_runs_is_told_with_what_is_wrong_with_it() -> None:
    assert judge.embedded("/bin/etcd", fault_of((3, 5, 30)), "").grade is Grade.FINE
    old = judge.embedded("/bin/etcd", fault_of((3, 5, 1)), "")
    assert old.grade is Grade.ADVICE
    assert (
        old.says
        == "standalone runs use /bin/etcd: etcd 3.5.1 may damage its data when it is killed under load"
    )
    assert judge.embedded("", "", "no etcd server was found").grade is Grade.ADVICE
