"""The one walk over a model: every parameter under every name, each memory once."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from freezekit._inventory import Inventory, ParameterInfo, take_inventory
from freezekit.errors import UnsupportedModelError
from zoo import (
    ZOO,
    ClassToken,
    EmptySlots,
    Encoder,
    ExpandedBias,
    NormZoo,
    PackedLinear,
    ShardedLinear,
    SharedTwice,
    Specimen,
    StorageTied,
    TiedLM,
    recursive,
)


def find(inventory: Inventory, fqn: str) -> ParameterInfo:
    """The parameter whose first name this is."""
    return next(info for info in inventory.parameters if info.fqn == fqn)


def make(**parameters: torch.Tensor) -> nn.Module:
    """A module that has just these parameters."""
    model = nn.Module()
    for name, tensor in parameters.items():
        model.register_parameter(
            name, tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
        )
    return model


# -- counting ----------------------------------------------------------------------------------


@pytest.mark.parametrize("specimen", ZOO, ids=lambda specimen: specimen.name)
def test_counts_are_those_counted_by_hand(specimen: Specimen) -> None:
    """Tensors, elements and bytes of each specimen are what its author counted."""
    parameters = take_inventory(specimen.make()).parameters
    found = (
        len(parameters),
        sum(info.numel for info in parameters),
        sum(info.nbytes for info in parameters),
        sum(info.numel for info in parameters if info.untrainable),
    )
    assert found == (specimen.tensors, specimen.numel, specimen.nbytes, specimen.untrainable)


@pytest.mark.parametrize(
    "specimen",
    [specimen for specimen in ZOO if specimen.name != "shared-twice"],
    ids=lambda specimen: specimen.name,
)
def test_names_are_those_of_named_parameters(specimen: Specimen) -> None:
    """Entries are torch's own names, the second ones of tied tensors included, in its order."""
    model = specimen.make()
    expected = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert [entry.raw for entry in take_inventory(model).entries] == expected


def test_every_place_of_a_shared_module_has_its_names() -> None:
    """A module used twice by one parent has both names, although torch tells only one."""
    model = SharedTwice()
    inventory = take_inventory(model)
    weight = find(inventory, "first.0.weight")
    assert weight.aliases == ("second.0.weight", "inner.third.0.weight")
    places = [info.fqn for info in inventory.modules if info.type_name == "BatchNorm1d"]
    assert places == ["first.1", "second.1", "inner.third.1"]
    repeats = [info.fqn for info in inventory.modules if info.repeats >= 0]
    assert repeats == [
        *("second", "second.0", "second.1"),
        *("inner.third", "inner.third.0", "inner.third.1"),
    ]


def test_subtrees_are_spans_of_the_walk() -> None:
    """A module's subtree holds its descendants' parameters and no sibling's."""
    inventory = take_inventory(Encoder(layers=11))
    (at,) = (i for i, info in enumerate(inventory.modules) if info.fqn == "encoder.layer.1")
    names = {inventory.parameters[i].fqn for i in inventory.subtree_parameters(at)}
    assert len(names) == 6
    assert all(name.startswith("encoder.layer.1.") for name in names)


def test_parameters_of_the_root_are_its_own() -> None:
    """A class token is owned by the root, and named without a dot."""
    inventory = take_inventory(ClassToken())
    info = find(inventory, "cls_token")
    assert (info.owner, info.shape) == (0, (1, 1, 2))


def test_empty_slots_are_no_parameters() -> None:
    """A parameter, a buffer or a child that is None is passed over."""
    inventory = take_inventory(EmptySlots())
    assert [entry.fqn for entry in inventory.entries] == ["weight"]
    assert inventory.buffers == []
    assert len(inventory.modules) == 1


def test_a_model_without_anything_has_one_module() -> None:
    """An empty model is an inventory of the root alone."""
    inventory = take_inventory(nn.ReLU())
    assert (inventory.parameters, inventory.entries, inventory.buffers) == ([], [], [])
    assert [info.type_name for info in inventory.modules] == ["ReLU"]


# -- one memory, several names -----------------------------------------------------------------


def test_a_tied_parameter_is_one_under_two_names() -> None:
    """The head's name is an alias of the embedding's."""
    inventory = take_inventory(TiedLM())
    assert find(inventory, "wte.weight").aliases == ("lm_head.weight",)
    assert "lm_head.weight" not in [info.fqn for info in inventory.parameters]


def test_two_parameters_over_one_memory_are_one() -> None:
    """Tensor objects that share storage are one parameter, with both objects at hand."""
    model = StorageTied()
    inventory = take_inventory(model)
    index = [info.fqn for info in inventory.parameters].index("encode.weight")
    assert inventory.parameters[index].aliases == ("decode.weight",)
    tensors = inventory.tensors(index)
    assert len(tensors) == 2
    assert tensors[0] is model.encode.weight
    assert tensors[1] is model.decode.weight


def test_a_view_counts_with_the_whole_that_it_looks_into() -> None:
    """Where a parameter is a part of another one's memory, the wider one is counted."""
    whole = torch.zeros(6)
    inventory = take_inventory(make(part=whole[2:4], whole=whole))
    (info,) = inventory.parameters
    assert (info.fqn, info.aliases) == ("part", ("whole",))
    assert (info.shape, info.numel, info.nbytes) == ((6,), 6, 24)


@pytest.mark.parametrize("order", ["whole-first", "whole-last"])
def test_a_whole_joins_all_of_its_parts(order: str) -> None:
    """Parts of one tensor that is a parameter too are one with it, in whatever order they come."""
    whole = torch.zeros(6)
    parts = {"left": whole[:3], "right": whole[3:]}
    named = {"whole": whole, **parts} if order == "whole-first" else {**parts, "whole": whole}
    (info,) = take_inventory(make(**named)).parameters
    assert {info.fqn, *info.aliases} == {"whole", "left", "right"}
    assert info.numel == 6


def test_a_flat_buffer_and_its_many_views_take_no_time() -> None:
    """A flat parameter over a hundred others is found out at once, not byte by byte in pairs."""
    flat = torch.zeros(100 * 1000)
    views = [flat[start : start + 1000] for start in range(0, 100 * 1000, 1000)]
    model = nn.ParameterList(nn.Parameter(tensor) for tensor in (*views, flat))
    begin = time.perf_counter()
    assert len(take_inventory(model).parameters) == 1
    assert time.perf_counter() - begin < 1


def test_neighbours_in_one_memory_are_two() -> None:
    """Slices of one flat buffer that do not overlap are parameters of their own."""
    flat = torch.zeros(6)
    inventory = take_inventory(make(left=flat[:3], right=flat[3:]))
    assert [info.fqn for info in inventory.parameters] == ["left", "right"]
    assert [info.numel for info in inventory.parameters] == [3, 3]


def test_columns_of_one_matrix_are_two() -> None:
    """Column blocks of one matrix (a fused QKV taken apart) share no element: they are not tied."""
    fused = torch.zeros(2, 6)
    inventory = take_inventory(make(query=fused[:, :3], key=fused[:, 3:]))
    assert [(info.fqn, info.aliases) for info in inventory.parameters] == [
        ("query", ()),
        ("key", ()),
    ]
    assert sum(info.numel for info in inventory.parameters) == 12


def test_equal_values_are_not_one_memory() -> None:
    """Two zero biases are two parameters."""
    inventory = take_inventory(make(one=torch.zeros(3), other=torch.zeros(3)))
    assert [info.aliases for info in inventory.parameters] == [(), ()]


def test_meta_tensors_are_told_apart() -> None:
    """Meta tensors have no address, and are not taken for one memory; a true tie still is one."""
    with torch.device("meta"):
        model = TiedLM()
    assert [info.fqn for info in take_inventory(model).parameters] == [
        "wte.weight",
        "body.weight",
        "body.bias",
    ]


def test_fake_tensors_are_told_apart() -> None:
    """A model of fake tensors is counted; nobody may ask for their addresses."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert [info.numel for info in take_inventory(model).parameters] == [4, 2, 4, 2]


def test_tensors_without_elements_are_told_apart() -> None:
    """Empty tensors occupy no memory that they could share."""
    inventory = take_inventory(make(one=torch.empty(0), other=torch.empty(0, 3)))
    assert [info.fqn for info in inventory.parameters] == ["one", "other"]


# -- odd tensors -------------------------------------------------------------------------------


def test_an_expanded_parameter_counts_the_memory_that_it_has() -> None:
    """Four elements that repeat one number are 4 bytes, not 16."""
    info = find(take_inventory(ExpandedBias()), "bias")
    assert (info.numel, info.nbytes) == (4, 4)


def test_a_sharded_parameter_counts_whole() -> None:
    """ZeRO-3's placeholder is counted as the tensor that it stands for."""
    info = find(take_inventory(ShardedLinear()), "weight")
    assert (info.layout, info.shape, info.numel, info.nbytes) == ("sharded", (3, 2), 6, 24)


def test_a_sharded_parameter_without_a_shape_is_flat() -> None:
    """Where only the size is noted, the shape is that many elements."""
    tensor = nn.Parameter(torch.empty(0))
    tensor.ds_numel = 6  # type: ignore[attr-defined]
    info = find(take_inventory(make(weight=tensor)), "weight")
    assert (info.shape, info.numel) == ((6,), 6)


def test_a_packed_parameter_counts_elements_unpacked_and_bytes_packed() -> None:
    """A 4-bit weight of 4 x 3 is 12 parameters in 6 bytes."""
    info = find(take_inventory(PackedLinear()), "weight")
    assert (info.layout, info.shape, info.numel, info.nbytes) == ("packed", (4, 3), 12, 6)


def test_a_packed_parameter_without_a_state_holds_two_in_a_byte() -> None:
    """Before bitsandbytes has noted the shape, two elements are counted per byte."""
    model = PackedLinear()
    model.weight.quant_state = None
    info = find(take_inventory(model), "weight")
    assert (info.shape, info.numel, info.nbytes) == ((12,), 12, 6)


def test_a_distributed_tensor_counts_whole() -> None:
    """A parameter with a device mesh (DTensor) has the shape of the whole, and is sharded."""

    class Distributed(nn.Parameter):
        device_mesh = "two devices"

    info = find(take_inventory(make(weight=Distributed(torch.zeros(2, 3)))), "weight")
    assert (info.layout, info.shape, info.numel, info.nbytes) == ("sharded", (2, 3), 6, 24)


def test_a_strided_view_counts_its_own_elements() -> None:
    """Every other row of a matrix is what it is: half the elements."""
    info = find(take_inventory(make(rows=torch.zeros(4, 2)[::2])), "rows")
    assert (info.numel, info.nbytes) == (4, 16)


def test_an_uninitialised_parameter_has_no_size() -> None:
    """A lazy parameter is named, and counts nothing."""
    info = find(take_inventory(nn.LazyLinear(2)), "weight")
    assert (info.layout, info.shape, info.numel, info.nbytes) == ("lazy", (), 0, 0)


def test_a_frozen_uninitialised_parameter_is_described() -> None:
    """A lazy parameter that is frozen already is an inventory's parameter like any other."""
    model = nn.LazyLinear(2)
    for parameter in model.parameters():
        parameter.requires_grad = False
    info = find(take_inventory(model), "weight")
    assert (info.layout, info.requires_grad, info.untrainable) == ("lazy", False, "")


def _inference_parameter() -> nn.Parameter:
    with torch.inference_mode():
        return nn.Parameter(torch.zeros(2), requires_grad=False)


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        pytest.param(
            nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False),
            "int8 tensors have no gradient",
            id="int8",
        ),
        pytest.param(
            nn.Parameter(torch.zeros(2, dtype=torch.bool), requires_grad=False),
            "bool tensors have no gradient",
            id="bool",
        ),
        pytest.param(
            _inference_parameter(),
            "it was made under torch.inference_mode(): clone it outside",
            id="inference",
        ),
        pytest.param(nn.Parameter(torch.zeros(2), requires_grad=False), "", id="frozen"),
        pytest.param(nn.Parameter(torch.zeros(2, dtype=torch.complex64)), "", id="complex"),
        pytest.param(nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn)), "", id="float8"),
    ],
)
def test_what_cannot_require_a_gradient_says_why(tensor: nn.Parameter, why: str) -> None:
    """Tensors without gradients tell the reason; all others tell none."""
    assert find(take_inventory(make(weight=tensor)), "weight").untrainable == why


def test_a_computed_parameter_says_so() -> None:
    """A parameter slot filled with a result of other tensors is not a leaf."""
    model = nn.Linear(2, 2)
    source = nn.Parameter(torch.ones(2))
    del model.bias
    model._parameters["bias"] = source * 2  # type: ignore[assignment]
    info = find(take_inventory(model), "bias")
    assert info.untrainable == "it is computed from other tensors (not a leaf)"


def test_a_gradient_is_seen() -> None:
    """An entry tells whether its tensor has a gradient."""
    model = nn.Linear(2, 2)
    model.weight.grad = torch.zeros(2, 2)
    inventory = take_inventory(model)
    assert find(inventory, "weight").has_grad
    assert not find(inventory, "bias").has_grad


# -- running statistics ------------------------------------------------------------------------


def test_norms_with_statistics_are_told_by_their_buffers() -> None:
    """Every norm that keeps statistics is known, and no other."""
    inventory = take_inventory(NormZoo())
    with_stats = [info.fqn for info in inventory.modules if info.has_running_stats]
    assert with_stats == ["bn1d", "bn2d", "bn3d", "sync", "instance"]


@pytest.mark.parametrize(
    ("buffer", "persistent", "expected"),
    [
        pytest.param(torch.zeros(1), True, True, id="saved-floats"),
        pytest.param(torch.zeros(1, dtype=torch.complex64), True, True, id="saved-complex"),
        pytest.param(torch.zeros(1), False, False, id="unsaved-table"),
        pytest.param(torch.zeros(1, dtype=torch.int64), True, False, id="saved-integers"),
    ],
)
def test_statistics_are_saved_floating_point_buffers(
    buffer: torch.Tensor, persistent: bool, expected: bool
) -> None:
    """Position ids and rotary tables, integers or not saved, are no statistics."""
    model = nn.Module()
    model.register_buffer("kept", buffer, persistent=persistent)
    assert take_inventory(model).modules[0].has_running_stats is expected


@pytest.mark.parametrize("learns", ["encode", "decode"])
def test_one_memory_learns_if_one_of_its_tensors_does(learns: str) -> None:
    """Of two tensors over one memory, either one's flag and gradient count for both."""
    model = StorageTied()
    model.requires_grad_(requires_grad=False)
    weight = model.get_parameter(f"{learns}.weight")
    weight.requires_grad = True
    weight.grad = torch.zeros_like(weight)
    info = find(take_inventory(model), "encode.weight")
    assert (info.requires_grad, info.has_grad) == (True, True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("running_mean", True),
        ("moving_avg", True),
        ("ema", True),
        ("weight_u", True),
        ("pixel_mean", False),
        ("scale", False),
    ],
)
def test_above_children_the_name_tells_statistics_from_constants(name: str, expected: bool) -> None:
    """A module with children may save a constant, such as the mean of its pixels: not held."""
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer(name, torch.zeros(2))
    assert take_inventory(model).modules[0].has_running_stats is expected


def test_a_module_without_parameters_belongs_to_what_surrounds_it() -> None:
    """BatchNorm without affine goes with the smallest block around it that has parameters."""
    block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    inventory = take_inventory(nn.Sequential(block, nn.Linear(2, 1)))
    (at,) = (i for i, info in enumerate(inventory.modules) if info.fqn == "0.1")
    assert inventory.enclosing_parameters(at) == {0, 1}


def test_nothing_surrounds_where_there_are_no_parameters() -> None:
    """A model without parameters has no part that has any."""
    assert take_inventory(nn.Dropout()).enclosing_parameters(0) == set()


def test_a_buffer_under_two_names_counts_once() -> None:
    """A buffer that two modules share is one buffer."""
    table = torch.zeros(4)
    model = nn.Sequential(nn.Identity(), nn.Identity())
    for module in model:
        module.register_buffer("table", table)
    (buffer,) = take_inventory(model).buffers
    assert (buffer.fqn, buffer.nbytes) == ("0.table", 16)


# -- what is not a model -----------------------------------------------------------------------


def _linear() -> nn.Linear:
    return nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        pytest.param(None, r"^expected a torch\.nn\.Module, got NoneType$", id="none"),
        pytest.param("bert", r"^expected a torch\.nn\.Module, got str$", id="str"),
        pytest.param(
            nn.Linear,
            r"^expected a module, got the class Linear: make an instance of it$",
            id="class",
        ),
        pytest.param(
            _linear().parameters(),
            r"got generator: pass the model itself, not model\.parameters\(\)$",
            id="parameters",
        ),
        pytest.param(
            SimpleNamespace(model=_linear()),
            r"got SimpleNamespace; its attribute \.model is one: pass that$",
            id="has-model",
        ),
        pytest.param(
            SimpleNamespace(model="bert"),
            r"^expected a torch\.nn\.Module, got SimpleNamespace$",
            id="has-a-model-name",
        ),
        pytest.param(
            _linear().state_dict(), r"^expected a torch\.nn\.Module, got OrderedDict$", id="state"
        ),
    ],
)
def test_what_is_not_a_model_is_named(model: object, message: str) -> None:
    """The error says what was given, and what to give instead."""
    with pytest.raises(UnsupportedModelError, match=message):
        take_inventory(model)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_script_module_is_refused() -> None:
    """A TorchScript module as the model is an error that says what to do instead."""
    script = torch.jit.script(_linear())
    message = "is a TorchScript module: .* Work on the eager module, then script it$"
    with pytest.raises(UnsupportedModelError, match=message):
        take_inventory(script)


def test_a_module_that_contains_itself_is_refused() -> None:
    """An endless tree is an error that names the place."""
    message = r"^the module 'inner\.outer' \(_Recursive\) contains itself$"
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        take_inventory(recursive())
    assert caught.value.fqn == "inner.outer"
