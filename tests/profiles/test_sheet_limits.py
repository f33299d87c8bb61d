"""Figures of a data sheet that no device has are refused by name: a unit that was mistaken is not a faster GPU."""

import json

import pytest

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.profiles.data_sheet import Figure, data_sheets, load_data_sheet

RATIOS = ("matmul_efficiency", "link_efficiency", "memory_efficiency", "network_efficiency", "attention_efficiency")
RATIOS += ("switch_efficiency", "tensor_shown", "allocator")


def sheet_with(tmp_path, name: str, value: float, unit: str, stack: bool = False):
    """An H100's data sheet with another figure, its own or that of other software."""
    sheet = json.loads(data_sheets()["h100-80gb"].read_text())
    figure = {"value": value, "unit": unit, "source": "s", "checked": "c"}
    if stack:
        sheet["stacks"] = {"pytorch": {name: figure}}
    else:
        sheet[name] = figure
    (tmp_path / "sheet.json").write_text(json.dumps(sheet))
    return load_data_sheet(tmp_path / "sheet.json")


@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "unit"),
    [
        *(pytest.param(name, 69, "ratio", id=f"percent as ratio: {name}") for name in RATIOS),
        *(pytest.param(name, 690, "%", id=f"above 100 %: {name}") for name in RATIOS),
        *(pytest.param(name, -0.5, "ratio", id=f"below 0: {name}") for name in RATIOS),
        pytest.param("overlap_coe", 0.4, "ratio", id="side by side faster than one after the other"),
        pytest.param("receive_coe", 0.9, "ratio", id="faster during a receive"),
        pytest.param("memory", 81920, "GiB", id="MiB as GiB"),
        pytest.param("matmul_16bit", 989000, "TFLOP/s", id="GFLOP/s as TFLOP/s"),
        pytest.param("matmul_16bit", 989, "PFLOP/s", id="TFLOP/s as PFLOP/s"),
        pytest.param("memory_bandwidth", 3350, "TB/s", id="GB/s as TB/s"),
        pytest.param("link", 450, "TB/s", id="link in TB/s"),
    ],
)
def test_a_figure_beyond_any_device_is_refused_by_name(tmp_path, name, value, unit, stack):
    with pytest.raises(UserError) as caught:
        sheet_with(tmp_path, name, value, unit, stack)
    (fault,) = caught.value.faults
    assert "sheet.json: " in fault and (name in fault or stack)


@pytest.mark.parametrize(
    ("name", "value", "unit", "reckoned"),
    [
        ("matmul_efficiency", 69, "%", 0.69),
        ("memory", 81920, "MiB", 80),
        ("memory_bandwidth", 3.35, "TB/s", 3350),
        ("link", 400, "Gb/s", 50),
        ("matmul_16bit", 2.5, "PFLOP/s", 2500),
        ("overlap_coe", 1, "ratio", 1),
    ],
)
def test_a_figure_in_another_unit_is_taken_in_a_sheet_and_for_other_software(tmp_path, name, value, unit, reckoned):
    assert getattr(sheet_with(tmp_path, name, value, unit), name).value == pytest.approx(reckoned)
    figure = sheet_with(tmp_path, name, value, unit, stack=True).stacks["pytorch"][name]
    assert isinstance(figure, Figure) and figure.value == pytest.approx(reckoned)
