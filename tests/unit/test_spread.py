import os

import pytest
import torch

from nemotron_ultra.ops.experts import routed_experts
from nemotron_ultra.ops.spread import spread

CPU = torch.device("cpu")


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_every_item_once_and_threads_left_alone(threads):
    done = torch.zeros(50, requires_grad=True)
    spread(lambda part: part.add_(1), done.detach().split(1), CPU)
    assert torch.equal(done, torch.ones(50))
    assert torch.get_num_threads() == threads


def test_an_error_reaches_the_caller(threads):
    with pytest.raises(ZeroDivisionError):
        spread(lambda n: 1 // n, [1, 2, 0, 3], CPU)


def test_an_error_waits_for_the_other_threads(threads):
    done = torch.zeros(20)

    def work(n: int) -> None:
        done[n] = 1 // n

    with pytest.raises(ZeroDivisionError):
        spread(work, range(20), CPU)
    before = done.clone()
    spread(lambda n: None, range(20), CPU)
    assert torch.equal(done, before)


def test_inference_tensors_may_be_written(threads):
    with torch.inference_mode():
        x = torch.zeros(8)
        spread(lambda part: part.add_(1), x.split(2), CPU)
    assert x.sum() == 8 and x.is_inference()


def test_experts_do_not_depend_on_the_number_of_threads(threads):
    g = torch.Generator().manual_seed(0)
    x, up, down = (torch.randn(s, generator=g) for s in ((40, 8), (6, 16, 8), (6, 8, 16)))
    indices = torch.rand(40, 6, generator=g).topk(2).indices
    y = routed_experts(x, indices, torch.ones(40, 2), up, down)
    torch.set_num_threads(1)
    assert torch.equal(y, routed_experts(x, indices, torch.ones(40, 2), up, down))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_works_in_a_forked_process(threads):
    spread(lambda n: None, [1, 2], CPU)
    child = os.fork()
    if child == 0:
        spread(lambda n: None, [1, 2], CPU)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
