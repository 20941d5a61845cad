"""Train calls that a thread traces while a training starts."""

from contextlib import nullcontext

import jax
import numpy as np
import pytest
from training.test_invariants import make_small_recipe

from podscale import pod as pods
from podscale.training import compilation
from podscale.training.advance_compilation import AdvanceCompiler
from podscale.training.compilation import compile_train_step, trace_in_advance, zeros_like
from podscale.training.setup import prepare
from podscale.training.step import describe_call_arguments


@pytest.fixture(scope="module")
def program():
    return prepare(make_small_recipe(), pods.make_pod(jax.devices(), "1x1"))


@pytest.fixture
def active(monkeypatch):
    """Convolutions are tuned on CPUs, too."""
    compiler = AdvanceCompiler(jax.devices()[0], {})
    monkeypatch.setattr(compilation, "compile_in_advance", lambda *_: nullcontext(compiler))
    return compiler


def test_a_call_that_a_thread_has_traced_is_the_same_call(program, active):
    with trace_in_advance(program) as traced:
        [early] = traced.calls.result().values()
    constants = (compilation.place_scalars(program.plan, program.mesh),)
    [late] = compilation._trace_calls(program, constants, active).values()
    assert early.lower().as_text() == late.lower().as_text()


@pytest.mark.heavy
def test_a_call_that_a_thread_has_traced_is_compiled_and_runs(program, active):
    with trace_in_advance(program) as traced:
        call = compile_train_step(program, traced=traced)
    size = program.plan.recipe.data.image_size
    images, labels, _ = zeros_like(describe_call_arguments(program.plan, program.mesh, size)[:3])
    state, metrics = call(program.init_state(), images, labels, np.int32(1))
    assert int(state.step) == 1
    assert np.isfinite(metrics.loss).all()


def test_what_tracing_raises_is_raised_where_the_call_is_compiled(program, active, monkeypatch):
    def fail(_):
        raise ValueError("cannot be traced")

    monkeypatch.setattr(compilation, "make_train_call", fail)
    with trace_in_advance(program) as traced, pytest.raises(ValueError, match="cannot be traced"):
        compile_train_step(program, traced=traced)


def test_no_thread_traces_with_settings_other_than_the_callers(program, active):
    with jax.default_matmul_precision("highest"), trace_in_advance(program) as traced:
        assert traced is None


@pytest.mark.parametrize("is_used", [True, False])
def test_no_thread_traces_where_no_convolutions_are_tuned(program, is_used):
    with trace_in_advance(program, is_used=is_used) as traced:
        assert traced is None
