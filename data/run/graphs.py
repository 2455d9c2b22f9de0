"""CUDA graphs: the host launches all kernels of a micro-step at once, and all kernels of an update."""

import torch


class MicroStepGraphs:
    """run(batch, mtp_weights, attn) -> loss, a 0-D tensor; as a CUDA graph for each key, if `enabled`.

    The first call with a key also captures a graph, and later calls with this key replay it. A replay launches hundreds
    of kernels at once: the host would take 30 to 39 ms to launch them one by one, and the GPU takes 21 ms to run them
    (stage 1, H200). A graph reads and writes fixed addresses, so its tensors are updated in place. It writes its loss
    to one address, too, so the next call with its key changes the loss that this call returns.
    """

    def __init__(self, run, enabled):
        self.run, self.enabled = run, enabled
        self.graphs = {}  # key -> (graph, and its batch, MTP weights, AttentionSettings, loss)
        # Autograd runs a backward pass on the stream of the forward pass, and `add_gradients` runs on the current
        # stream. So all micro-steps use one stream.
        # Only one graph runs at a time, so the graphs share one memory pool.
        self.stream, self.pool = (torch.cuda.Stream(), torch.cuda.graph_pool_handle()) if enabled else (None, None)

    def run_eagerly(self, run, *args):
        """run(*args) without a graph, on the stream of the graphs."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = run(*args)
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def capture(self, run, *args):
        """(graph, result) of run(*args), which is captured and not run."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: the threads of the loader may call CUDA during the capture.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            result = run(*args)
        return graph, result

    def __call__(self, batch, mtp_weights, attn, stage, eager=False):
        """eager: launch the kernels of the graph one by one, so that a trace shows the layer of each kernel."""
        if not self.enabled:
            return self.run(batch, mtp_weights, attn)
        # The key is StepPlan.forward_key, unless the batch has more targets than candidates: such a batch takes all
        # classes, and the warm-up may not have met its graph.
        key = stage, 0 if batch.candidates is None else len(batch.candidates)
        if key not in self.graphs:
            # The first run compiles kernels, which a capture must not do.
            loss = self.run_eagerly(self.run, batch, mtp_weights, attn)
            batch, mtp_weights = batch.clone(), mtp_weights.clone()
            # The graph copies its loss to the first loss, because the graph of an update may use the memory in which
            # the graph computes its loss.
            graph, _ = self.capture(lambda *args: loss.copy_(self.run(*args)), batch, mtp_weights, attn)
            self.graphs[key] = graph, batch, mtp_weights, attn, loss
            return loss
        graph, graph_batch, graph_weights, graph_attn, loss = self.graphs[key]
        graph_batch.buffer.copy_(batch.buffer)  # the key decides the shapes, so all tensors have the same places
        graph_weights.copy_(mtp_weights)
        if eager:
            return self.run_eagerly(self.run, graph_batch, graph_weights, graph_attn)
        graph.replay()
        return loss


class UpdateGraphs:
    """run(plan, numbers): the update of a step; as a CUDA graph for each key, if `enabled`.

    The update of a small model has hundreds of kernels, and the host takes 12 ms to launch them one by one, longer than
    the GPU takes for the whole step. A graph reads its numbers at fixed addresses, where each step puts its own. The
    graphs of several ranks also hold their exchange, so all ranks capture and replay in the same order.

    micro_steps: MicroStepGraphs, whose stream and memory these graphs share. names: those of the numbers.
    """

    def __init__(self, run, enabled, micro_steps, names):
        self.run, self.enabled, self.micro_steps, self.graphs = run, enabled, micro_steps, {}
        self.numbers = None  # {name: 0-D tensor}, if enabled
        if enabled:  # 16 bytes for each number: for other addresses, compilers make other kernels
            self.values = torch.zeros(len(names), 4, device="cuda")[:, 0]
            self.numbers = dict(zip(names, self.values.unbind()))

    def set_numbers(self, values):
        """values (len(names),): the numbers of the next update. Returns them as `self.numbers`."""
        if self.enabled:
            self.values.copy_(values)
        return self.numbers

    def __call__(self, plan, numbers, eager=False):
        """numbers: used only if not `enabled`; a graph reads those of `set_numbers`. eager: as in MicroStepGraphs."""
        if not self.enabled:
            self.run(plan, numbers)
            return
        key = plan.update_key
        if key in self.graphs and not eager:
            self.graphs[key].replay()
            return
        self.micro_steps.run_eagerly(self.run, plan, self.numbers)
        if key not in self.graphs and not plan.split:  # the split happens once
            self.graphs[key], _ = self.micro_steps.capture(self.run, plan, self.numbers)

    def drop(self):
        """Free the graphs. NCCL would wait for them without end when its group of processes ends."""
        self.graphs.clear()
