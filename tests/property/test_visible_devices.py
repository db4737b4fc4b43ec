"""CUDA_VISIBLE_DEVICES holds its rules for any text and any machine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oomrun.core.topology import Device, Host, Inventory, SelectionError, select
from oomrun.core.visibility import visible

HOST = Host(memory_total_bytes=1 << 36, memory_available_bytes=1 << 35)


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    digits = st.text("0123456789abcdef", min_size=8, max_size=8)
    names = draw(st.lists(digits, unique=True, max_size=8))
    devices: list[Device] = []
    for index, name in enumerate(names):
        migs = draw(st.integers(0, 2))
        gpu = Device(
            id=f"GPU-{name}",
            kind="gpu",
            name="H100",
            index=index,
            pci_bus_id=f"00000000:{index:02x}:00.0",
            mig_enabled=migs > 0,
            problem="in MIG mode" if migs else None,
        )
        devices.append(gpu)
        devices += [
            Device(id=f"MIG-{name}-{n}", kind="mig", name="MIG", parent=gpu.id)
            for n in range(migs)
        ]
    cpu = Device(id="cpu:0", kind="cpu", name="CPU")
    return Inventory(devices=(*devices, cpu), host=HOST)


def words(inventory: Inventory) -> st.SearchStrategy[str]:
    ids = [device.id for device in inventory.devices]
    return st.one_of(
        st.integers(-2, 9).map(str),
        st.sampled_from(ids),
        st.sampled_from(ids).flatmap(
            lambda name: st.integers(0, len(name)).map(lambda n: name[:n])
        ),
        st.text(max_size=6),
    )


@st.composite
def machines_and_texts(draw: st.DrawFn) -> tuple[Inventory, str]:
    inventory = draw(inventories())
    return inventory, ",".join(draw(st.lists(words(inventory), max_size=6)))


@given(machines_and_texts())
def test_any_text_gives_a_part_of_the_machine(case: tuple[Inventory, str]) -> None:
    inventory, text = case
    seen = visible(inventory, text)
    assert len(set(seen.devices)) == len(seen.devices)
    assert set(seen.devices) <= set(inventory.devices)
    assert seen.devices[-1].kind == "cpu"
    hidden = len(seen.devices) < len(inventory.devices)
    gone = hidden and not any(device.kind != "cpu" for device in seen.devices)
    assert seen.problems or not gone, "when all GPUs are hidden, it is said why"


@given(machines_and_texts())
def test_the_full_ids_of_what_is_seen_mean_the_same_again(
    case: tuple[Inventory, str],
) -> None:
    """Passing UUIDs on to a worker shows it the devices that were chosen."""
    inventory, text = case
    for kind, prefix in (("gpu", "GPU-"), ("mig", "MIG-")):
        ids = [d.id for d in visible(inventory, text).devices if d.kind == kind]
        again = visible(inventory, ",".join(ids))
        assert [d.id for d in again.devices if d.id.startswith(prefix)] == ids


@given(inventories(), st.data())
def test_numbers_in_order_until_the_first_that_is_wrong(
    inventory: Inventory, data: st.DataObject
) -> None:
    gpus = [device for device in inventory.devices if device.kind == "gpu"]
    good = data.draw(st.permutations(range(len(gpus))))
    rest = data.draw(st.lists(st.integers(0, 7).map(str), max_size=3))
    text = ",".join([*map(str, good), "-1", *rest])
    seen = [d for d in visible(inventory, text).devices if d.kind == "gpu"]
    assert seen == [gpus[n] for n in good]


@given(machines_and_texts())
def test_auto_always_finds_something_usable(case: tuple[Inventory, str]) -> None:
    inventory, text = case
    chosen = select(visible(inventory, text), "auto")
    assert chosen
    assert all(device.usable for device in chosen)


@given(
    machines_and_texts(),
    st.lists(st.one_of(st.integers(-2, 9), st.text(max_size=5)), max_size=4),
)
def test_a_choice_is_devices_or_a_plain_refusal(
    case: tuple[Inventory, str], wanted: list[int | str]
) -> None:
    inventory, text = case
    try:
        chosen = select(visible(inventory, text), wanted)
    except SelectionError:
        return
    assert len(chosen) == len(wanted)
    assert all(device.usable for device in chosen)
