"""Micro-steps as CUDA graphs: the host launches all kernels of a micro-step at once."""

import torch


class MicroStepGraphs:
    """run(batch, mtp_weights, attn) -> loss, a 0-D tensor; as a CUDA graph for each key, if `enabled`.

    The first call with a key also captures a graph, and later calls with this key replay it. A replay launches hundreds
    of kernels at once: the host would take 30 to 39 ms to launch them one by one, and the GPU takes 21 ms to run them
    (stage 1, H200). A graph reads and writes fixed addresses, so its tensors are updated in place.
    """

    def __init__(self, run, enabled):
        self.run, self.enabled = run, enabled
        self.graphs = {}  # key -> (graph, and its batch, MTP weights, AttentionSettings, loss)
        # Autograd adds gradients on the stream that first used the parameter, so all micro-steps use one stream.
        # Only one graph runs at a time, so the graphs share one memory pool.
        self.stream, self.pool = (torch.cuda.Stream(), torch.cuda.graph_pool_handle()) if enabled else (None, None)

    def run_eagerly(self, batch, mtp_weights, attn):
        """`run` without a graph, on the stream of the graphs."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            loss = self.run(batch, mtp_weights, attn)
        torch.cuda.current_stream().wait_stream(self.stream)
        return loss

    def __call__(self, batch, mtp_weights, attn, stage, eager=False):
        """eager: launch the kernels of the graph one by one, so that a trace shows the layer of each kernel."""
        if not self.enabled:
            return self.run(batch, mtp_weights, attn)
        # The key is StepPlan.forward_key, unless the batch has more targets than candidates: such a batch takes all
        # classes, and the warm-up may not have met its graph.
        key = stage, 0 if batch.candidates is None else len(batch.candidates)
        if key not in self.graphs:
            first_loss = self.run_eagerly(batch, mtp_weights, attn)  # compiles kernels, which a capture must not do
            batch, mtp_weights, graph = batch.clone(), mtp_weights.clone(), torch.cuda.CUDAGraph()
            # thread_local: the threads of the loader may call CUDA during the capture.
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                loss = self.run(batch, mtp_weights, attn)
            self.graphs[key] = graph, batch, mtp_weights, attn, loss
            return first_loss
        graph, graph_batch, graph_weights, graph_attn, loss = self.graphs[key]
        for target, value in zip((*graph_batch.tensors, graph_weights), (*batch.tensors, mtp_weights)):
            target.copy_(value)
        if eager:
            return self.run_eagerly(graph_batch, graph_weights, graph_attn)
        graph.replay()
        return loss
