"""Lists of hosts are read as they were written, in each notation."""

import re
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.launch.clusters import first_host, is_ipv6, listed_hosts, read_hostfile

NAMES = st.one_of(st.from_regex(r"[a-z][a-z0-9.-]{0,8}[a-z]", fullmatch=True), st.ip_addresses(v=4).map(str))
HOSTS = st.lists(NAMES, min_size=1, max_size=6, unique=True)


@st.composite
def folded_hosts(draw) -> tuple[str, list[str]]:
    """A list as Slurm writes it, and its hosts."""
    texts: list[str] = []
    hosts: list[str] = []
    for _ in range(draw(st.integers(1, 4))):
        text, choices = "", []
        for _ in range(draw(st.integers(0, 3))):
            name = draw(st.from_regex(r"[a-z]{1,4}-?", fullmatch=True))
            width, ranges = draw(st.integers(1, 4)), []
            numbers: list[str] = []
            for _ in range(draw(st.integers(1, 3))):
                first, more = draw(st.integers(0, 9)), draw(st.integers(0, 12))
                numbers += [f"{number:0{width}d}" for number in range(first, first + more + 1)]
                ranges.append(f"{first:0{width}d}" + (f"-{first + more:0{width}d}" if more else ""))
            text += f"{name}[{','.join(ranges)}]"
            choices += [[name], numbers]
        end = draw(st.sampled_from(["x", "-ib", ".example"]))
        texts.append(text + end)
        hosts += ["".join(parts) for parts in product(*choices, [end])]
    return ",".join(texts), hosts


@given(folded_hosts())
def test_slurms_lists_are_unfolded(case):
    text, hosts = case
    assert list(listed_hosts(text)) == hosts and first_host(text) == hosts[0]


def test_the_first_host_of_slurms_list():
    listed = {"a": "a", "a,b": "a", "gpu-[07-09,12],x": "gpu-07", "n[1,4]": "n1", "r1-[3-4]-ib": "r1-3-ib", "": ""}
    listed |= {"rack[1-2]gpu[01-02]": "rack1gpu01", "10.0.0.[7-9]": "10.0.0.7"}
    assert {nodes: first_host(nodes) for nodes in listed} == listed


@pytest.mark.parametrize(
    "text", ["n[1-2", "n1]", "n[]", "n[2-1]", "n[a]", "n[1-99999999]", "n[1-400]m[1-400]", "n[[1]]"]
)
def test_broken_lists_are_refused(text):
    with pytest.raises(UserError, match=re.escape(text)):
        list(listed_hosts(text))


NOTATIONS = {
    "a host a line": lambda hosts: "\n".join(hosts),
    "Open MPI": lambda hosts: "".join(f"{host} slots=8 max_slots = 8\n" for host in hosts),
    "Torque": lambda hosts: "".join(f"{host} np=8 gpus=4\n" for host in hosts),
    "MPICH": lambda hosts: "".join(f"{host}:8\n" for host in hosts),
    "MVAPICH": lambda hosts: "".join(f"{host}:8:mlx5_0  # rack 1\n" for host in hosts),
    "Grid Engine": lambda hosts: "".join(f"{host} 8 all.q@{host} UNDEFINED\n" for host in hosts),
    "LSF": lambda hosts: "".join(f"{host} 8\n" for host in hosts),
    "PBS": lambda hosts: "".join(f"{host}\n" * 8 for host in hosts),
    "PBS, by slots": lambda hosts: "".join(f"{host}\n" for host in hosts) * 2,
    "users": lambda hosts: "".join(f"me@{host}\t slots=4\r\n" for host in hosts),
    "one line": lambda hosts: ",".join(hosts),
    "one line with blanks": lambda hosts: " , ".join(hosts) + "\n",
    "one line with slots": lambda hosts: ",".join(f"{host}:8" for host in hosts),
    "comments and a byte order mark": lambda hosts: "\ufeff# nodes\n\n" + "".join(f" {host} # own\n" for host in hosts),
}


@given(HOSTS, st.sampled_from(sorted(NOTATIONS)))
def test_every_notation_of_a_hostfile_is_read_back(tmp_path_factory, hosts, notation):
    path = tmp_path_factory.mktemp("hosts") / "hosts"
    path.write_text(NOTATIONS[notation](hosts), newline="")
    assert read_hostfile(path) == hosts


@given(folded_hosts())
def test_a_hostfile_may_hold_slurms_list(tmp_path_factory, case):
    text, hosts = case
    path = tmp_path_factory.mktemp("hosts") / "hosts"
    path.write_text(f"{text} slots=8\n")
    assert read_hostfile(path) == list(dict.fromkeys(hosts))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nb c\n", "line 2: 'c' is unknown behind a host; write one host a line"),
        ("a 8 b 8", "line 1: '8 b 8' is unknown"),
        ("a\nfd00::12", "line 2: fd00::12: IPv6 is not supported"),
        ("[fd00::12]:8", "IPv6 is not supported"),
        ("me@fe80::1%eth0 slots=8", "IPv6 is not supported"),
        ("a\n\n[01-02", "line 3: .* a bracket has no partner"),
        ("a%b", "line 1: 'a%b' is no host"),
        ("a:b", "line 1: 'a:b' is no host"),
        ("# none\n\n", "names no node"),
    ],
)
def test_what_is_no_list_of_hosts_is_refused_with_its_line(tmp_path, text, message):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(UserError, match=message):
        read_hostfile(tmp_path / "hosts")


@given(st.text(max_size=60))
def test_any_text_is_hosts_or_refused(tmp_path_factory, text):
    path: Path = tmp_path_factory.mktemp("hosts") / "hosts"
    path.write_text(text.encode(errors="replace").decode(), newline="")
    try:
        hosts = read_hostfile(path)
    except UserError as error:
        assert str(path) in str(error)
    else:
        assert hosts and all(re.fullmatch(r"[\w.-]+", host) for host in hosts)


@given(st.ip_addresses(v=6).map(str))
def test_ipv6_is_known_by_its_form(address):
    assert is_ipv6(address) and is_ipv6(f"[{address}]") and is_ipv6(f"[{address}]:71")


@given(NAMES)
def test_other_names_are_no_ipv6(name):
    assert not is_ipv6(name) and not is_ipv6(f"{name}:8")
