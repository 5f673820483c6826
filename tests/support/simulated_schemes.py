"""Programs of context-parallel attention for `simulated_run`, right or broken in one named way.

compute, stream 7    [attention 0][attention 1][attention 2]      two receive buffers: kv 1 overwrites what
kv, stream 13        [kv 0]  [kv 1]                               attention 0 has read
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.support.simulated_run import Host

FORWARD_KERNEL = "void flash_fwd_kernel<Traits<128>>(Params)"
BACKWARD_KERNEL = "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Traits<128>>(Params)"
SEND_RECV_KERNEL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
MERGE_KERNEL = "void at::native::vectorized_elementwise_kernel<4>(int)"
GEMM_KERNEL = "nvjet_hsh_128x256_64x4"

COMPUTE, KV, DKV = 7, 13, 14
_KV_ARRIVED, _KV_READ, _SUMMED, _DKV_ARRIVED, _READY = 100, 200, 300, 400, 500


@dataclass(frozen=True)
class Ring:
    """A ring of `n_ranks`, forward and backward, and in which way it is broken.

    Attributes:
        n_ranks: Ranks, which are also the hops.
        n_buffers: Receive buffers: 2 overlap, 1 is a fault.
        kv_stream: Stream of K and V.
        dkv_stream: Stream of the gradients.
        blocks_host: Whether the host waits for each transfer right behind its launch.
        waits: Whether attention waits for what it reads.
        pause_ns: What the host does before each launch.
        attention_ns: Time of attention per rank; one for all, or one each.
        transfer_ns: Time of a transfer per rank; likewise.
        is_forward_only: Whether there is no backward pass.
        n_steps: Steps.
        syncs_after_step: Whether the host waits for the device at the end of each step.
        held_ns: How much later than it could each attention starts.
        has_gemms: Whether a matrix product comes before and after each pass, as in a model.
        attention_first: Whether each hop launches its attention before the transfer of the next chunk.
    """

    n_ranks: int = 4
    n_buffers: int = 2
    kv_stream: int = KV
    dkv_stream: int = DKV
    blocks_host: bool = False
    waits: bool = True
    pause_ns: int = 0
    attention_ns: tuple[int, ...] = (500_000,)
    transfer_ns: tuple[int, ...] = (400_000,)
    is_forward_only: bool = False
    n_steps: int = 1
    syncs_after_step: bool = False
    attention_first: bool = False
    held_ns: int = 0
    has_gemms: bool = False

    def but(self, **changes: object) -> Ring:
        """Return the same with some changes."""
        return replace(self, **changes)

    def hosts(self) -> list[Host]:
        """Return the programs of all ranks."""
        return [_RingRank(self, rank).make() for rank in range(self.n_ranks)]


class _RingRank:
    def __init__(self, ring: Ring, rank: int) -> None:
        self.ring, self.host = ring, Host(rank)
        self.peers = tuple(sorted({(rank - 1) % ring.n_ranks, (rank + 1) % ring.n_ranks}))

    def make(self) -> Host:
        for _ in range(self.ring.n_steps):
            with self.host.scope("step"):
                self._pass("forward")
                if not self.ring.is_forward_only:
                    self._pass("backward")
                if self.ring.syncs_after_step:
                    self.host.sync()
        return self.host

    def _pass(self, name: str) -> None:
        ring, host = self.ring, self.host
        if ring.has_gemms:
            host.launch(GEMM_KERNEL, 50_000)
        with host.scope(f"{name} layer=0"):
            self._order(_READY, COMPUTE, ring.kv_stream)
            for hop in range(ring.n_ranks):
                if hop and ring.waits:
                    self._order(_KV_ARRIVED + hop - 1, None, COMPUTE)
                if hop < ring.n_ranks - 1 and not self._waits_for_attention(hop):
                    self._send_kv(name, hop)
                self._attention(name, hop)
                if hop < ring.n_ranks - 1 and self._waits_for_attention(hop):
                    self._send_kv(name, hop)
                if name == "backward":
                    self._send_dkv(hop)
            if name == "backward" and ring.waits:
                self._order(_DKV_ARRIVED + ring.n_ranks - 1, None, COMPUTE)
        if ring.has_gemms:
            host.launch(GEMM_KERNEL, 50_000)

    def _waits_for_attention(self, hop: int) -> bool:
        """Return whether a hop's transfer comes behind its attention, as one that overwrites what that reads must."""
        return self.ring.attention_first or (self.ring.n_buffers == 1 and hop > 0)

    def _attention(self, name: str, hop: int) -> None:
        kernel = FORWARD_KERNEL if name == "forward" else BACKWARD_KERNEL
        self._launch(
            kernel, self._of_rank(self.ring.attention_ns), COMPUTE, f"attention pass={name} layer=0 hop={hop}"
        )
        self._record(_KV_READ + hop, COMPUTE)

    def _send_kv(self, name: str, hop: int) -> None:
        overwritten = hop + 1 - self.ring.n_buffers
        if overwritten > 0:  # chunk 0 is the rank's own and in no buffer
            self._order(_KV_READ + overwritten, None, self.ring.kv_stream)
        self._transfer("kv", name, hop, self.ring.kv_stream)
        self._record(_KV_ARRIVED + hop, self.ring.kv_stream)

    def _send_dkv(self, hop: int) -> None:
        if hop and self.ring.waits:
            self._order(_DKV_ARRIVED + hop - 1, None, COMPUTE)
        self._launch(MERGE_KERNEL, 5_000, COMPUTE, f"merge pass=backward layer=0 hop={hop}")
        self._order(_SUMMED + hop, COMPUTE, self.ring.dkv_stream)
        self._transfer("dkv", "backward", hop, self.ring.dkv_stream)
        self._record(_DKV_ARRIVED + hop, self.ring.dkv_stream)

    def _transfer(self, tensor: str, name: str, hop: int, stream: int) -> None:
        what = f"send_recv pass={name} layer=0 hop={hop} tensor={tensor} bytes=64"
        duration = self._of_rank(self.ring.transfer_ns)
        self.host.pause(self.ring.pause_ns)
        self.host.transfer(SEND_RECV_KERNEL, duration, stream, label=what, peers=self.peers)
        if self.ring.blocks_host:
            self.host.sync(stream=stream)

    def _launch(self, name: str, ns: int, stream: int, label: str) -> None:
        self.host.pause(self.ring.pause_ns)
        held = self.ring.held_ns if label.startswith("attention") else 0
        self.host.launch(name, ns, stream, label=label, held_ns=held)

    def _order(self, event: int, recorded_in: int | None, stream: int) -> None:
        """Make a stream wait for an event, recorded before or just now."""
        if recorded_in is not None:
            self.host.record(event, recorded_in)
        self.host.wait(event, stream)

    def _record(self, event: int, stream: int) -> None:
        self.host.record(event, stream)

    def _of_rank(self, times: tuple[int, ...]) -> int:
        return times[self.host.rank % len(times)]


def ulysses(stream: int = COMPUTE, n_ranks: int = 2, *, is_labelled: bool = True) -> list[Host]:
    """Return Ulysses: exchanges before and after attention, in its own stream or in another one, between gemms."""
    hosts = [Host(rank) for rank in range(n_ranks)]
    for host in hosts:
        peers = tuple(rank for rank in range(n_ranks) if rank != host.rank)
        with host.scope("step"):
            for name, kernel in (("forward", FORWARD_KERNEL), ("backward", BACKWARD_KERNEL)):
                host.launch(GEMM_KERNEL, 50_000)
                with host.scope(f"{name} layer=0" if is_labelled else ""):
                    for tensor in ("q", "k", "v"):
                        _exchange(host, name, tensor, stream, peers)
                    host.launch(kernel, 500_000, label=f"attention pass={name} layer=0 hop=0")
                    _exchange(host, name, "out", stream, peers)
                host.launch(GEMM_KERNEL, 50_000)
    return hosts


def _exchange(host: Host, name: str, tensor: str, stream: int, peers: tuple[int, ...]) -> None:
    what = f"all_to_all pass={name} layer=0 hop=0 tensor={tensor} bytes=64"
    host.record(1, COMPUTE)
    host.wait(1, stream)
    host.transfer(SEND_RECV_KERNEL, 100_000, stream, label=what, peers=peers)
    host.record(2, stream)
    host.wait(2, COMPUTE)
