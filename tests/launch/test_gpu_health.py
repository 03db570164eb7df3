"""Errors of GPUs in the output of nvidia-smi and in the kernel log.

The texts were written by hand, in the formats that NVIDIA documents: the Xid catalog, and the help
of nvidia-smi.
"""

import pytest

from threefold.launch.gpu_watch import (
    COUNT,
    LEAVE_OUT,
    NO_ANSWER,
    GpuError,
    bus,
    health,
    judge,
    new_errors,
    xids,
)

ECC = ["00000000:3B:00.0, 0", "00000000:AF:00.0, [N/A]"]
ROWS = ["00000000:3B:00.0, 0, 0", "00000000:AF:00.0, No, No"]
FALLEN = (
    "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
)
HEALTHY = health(ECC, ROWS, [])


def logged(number: int, text: str = "", gpu: str = "3b", seconds: float = 9.0) -> list[str]:
    """Return the kernel log with one Xid."""
    return [f"[{seconds:12.6f}] NVRM: Xid (PCI:0000:{gpu}:00): {number}, pid=4242, {text}"]


@pytest.mark.parametrize(
    "line",
    [
        f"[12345.678901] {FALLEN}",  # dmesg
        f"[12345.678901] node1 kernel: {FALLEN}",  # journalctl --output=short-monotonic
        f"6,1234,12345678901,-;{FALLEN}",  # /dev/kmsg
    ],
)
def test_every_form_of_the_kernel_log_is_read(line: str) -> None:
    ((seconds, gpu, number, text),) = xids(["[1.0] systemd[1]: started", line])
    assert (round(seconds, 6), gpu, number) == (12345.678901, "0000:3b:00", 79)
    assert text.startswith("pid=") and len(text) <= 160


def test_an_old_driver_prints_no_pci_and_no_domain() -> None:
    assert xids(["[1.5] NVRM: Xid (0000:03:00): 14, Channel 1"]) == [
        [1.5, "0000:03:00", 14, "Channel 1"]
    ]
    assert bus("3B:00.0") == bus("00000000:3B:00.0") == bus("0000:3b:00") == "0000:3b:00"


@pytest.mark.parametrize("number", range(1, 175))
def test_every_xid_has_a_judgement(number: int) -> None:
    error = judge(number, "0000:3b:00", "pid=1")
    severe = number in {46, 48, 62, 64, 79, 95, 109, 110, 119, 120, 136, 140, 143}
    counted = number in {54, 74, 94, 144, 145, 146, 149, 150, 171, 172}
    assert (error is not None) == (severe or counted)
    if error is not None:
        assert error.severe == severe
        assert error.text.startswith(f"Xid {number} on GPU 0000:3b:00: ")
    assert not LEAVE_OUT.keys() & COUNT.keys()


@pytest.mark.parametrize("number", [13, 31, 32, 43, 45, 63, 69, 92])
def test_errors_of_the_application_and_repairs_are_ignored(number: int) -> None:
    assert new_errors(HEALTHY, health(ECC, ROWS, logged(number, "Graphics Exception"))) == []


@pytest.mark.parametrize(
    ("action", "severe"),
    [
        ("GPU Reset Required", True),
        ("Node Reboot Required", True),
        ("Drain and Reset", True),
        ("None", False),
        ("Drain P2P", False),
    ],
)
def test_the_action_that_the_driver_recommends_decides(action: str, severe: bool) -> None:
    text = f"GPU recovery action changed from 0x0 (None) to 0x1 ({action})"
    errors = new_errors(HEALTHY, health(ECC, ROWS, logged(154, text)))
    assert [error.severe for error in errors] == [True] * severe


def test_only_later_lines_of_the_log_count() -> None:
    before = health(ECC, ROWS, logged(79, seconds=5.0))
    assert new_errors(before, before) == []
    same = health(ECC, ROWS, [*logged(79, seconds=5.0), *logged(48, seconds=6.0)])
    assert new_errors(before, same) == [
        GpuError("Xid 48 on GPU 0000:3b:00: uncorrectable ECC error", severe=True)
    ]
    assert new_errors(None, same) == []  # from before the run


def test_gpus_of_other_jobs_are_ignored() -> None:
    assert new_errors(HEALTHY, health(ECC, ROWS, logged(79, gpu="5e"))) == []
    unknown = health([], [], [])  # nvidia-smi says nothing
    assert new_errors(unknown, health([], [], logged(79, gpu="5e")))[0].severe


@pytest.mark.parametrize(
    ("queries", "rows", "text", "severe"),
    [
        (["00000000:3B:00.0, 2", ECC[1]], ROWS, "2 new uncorrectable ECC errors on GPU", False),
        (ECC, ["00000000:3B:00.0, 1, 0"], "row remapping is pending on GPU", False),
        (ECC, ["00000000:3B:00.0, Yes, No"], "row remapping is pending on GPU", False),
        (ECC, ["00000000:3B:00.0, 0, 1"], "row remapping failed on GPU 0000:3b:00", True),
        (ECC[1:], ROWS[1:], "nvidia-smi no longer lists GPU 0000:3b:00", True),
        (["No devices were found"], [], "nvidia-smi no longer lists any GPU", False),
        (None, [], NO_ANSWER, False),
        (
            [ECC[1], "Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error"],
            [],
            "Unable to determine the device handle for GPU0000:3B:00.0",
            True,
        ),
        (
            [
                "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.  "
                "Reboot the system to recover this GPU"
            ],
            [],
            "GPU is lost",
            True,
        ),
        (["00000000:3B:00.0, [GPU requires reset]", ECC[1]], ROWS, "requires reset", True),
    ],
)
def test_states_of_nvidia_smi(
    queries: list[str] | None, rows: list[str], text: str, severe: bool
) -> None:
    (error,) = new_errors(HEALTHY, health(queries, rows, []))
    assert text in error.text and error.severe == severe


def test_states_from_before_the_run_are_not_new() -> None:
    worn = health(["00000000:3B:00.0, 7"], ["00000000:3B:00.0, 1, 1"], [])
    assert new_errors(None, worn) == new_errors(worn, worn) == []
    more = health(["00000000:3B:00.0, 8"], ["00000000:3B:00.0, 1, 1"], [])
    assert [e.text for e in new_errors(worn, more)] == [
        "1 new uncorrectable ECC errors on GPU 0000:3b:00"
    ]


def test_a_lost_gpu_and_a_silent_driver_are_errors_at_once() -> None:
    lost = health(["Unable to determine the device handle for GPU0000:3B:00.0"], [], [])
    assert new_errors(None, lost)[0].severe
    assert new_errors(None, health(None, [], [])) == [GpuError(NO_ANSWER, severe=False)]


def test_a_field_that_the_driver_does_not_know_is_not_an_error() -> None:
    unknown = ['Field "remapped_rows.failure" is not a valid field to query.']
    assert new_errors(HEALTHY, health(ECC, unknown, [])) == []
