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
ALL_GATHER_KERNEL = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
MERGE_KERNEL = "void at::native::vectorized_elementwise_kernel<4>(int)"
GEMM_KERNEL = "nvjet_hsh_128x256_64x4"

_FLASH = (
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, cutlass::bfloat16_t>, false, {}>(Params)"
)
CAUSAL_KERNEL = _FLASH.format("true, false, false, true, true, false, false")
FULL_KERNEL = _FLASH.format("false, false, false, true, true, false, false")

COMPUTE, SECOND, KV, DKV = 7, 9, 13, 14
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
        kernels: Names of the forward attention kernels hop by hop; the last is that of all further hops too.
        skips_masked: Whether rank r has attention in r + 1 hops alone, as with contiguous chunks and a causal mask.
        aside_ns: Time of the copy, in the transfer's stream, that puts aside what each transfer sends; 0 for none.
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
    kernels: tuple[str, ...] = (FORWARD_KERNEL,)
    skips_masked: bool = False
    aside_ns: int = 0

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
        forward = self.ring.kernels[min(hop, len(self.ring.kernels) - 1)]
        kernel = forward if name == "forward" else BACKWARD_KERNEL
        if hop <= self.host.rank or not self.ring.skips_masked:
            duration = self._of_rank(self.ring.attention_ns)
            self._launch(kernel, duration, COMPUTE, f"attention pass={name} layer=0 hop={hop}")
        self._record(_KV_READ + hop, COMPUTE)

    def _send_kv(self, name: str, hop: int) -> None:
        if hop:
            self._put_aside("kv", name, hop, self.ring.kv_stream)
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
        self._put_aside("dkv", "backward", hop, self.ring.dkv_stream)
        self._transfer("dkv", "backward", hop, self.ring.dkv_stream)
        self._record(_DKV_ARRIVED + hop, self.ring.dkv_stream)

    def _put_aside(self, tensor: str, name: str, hop: int, stream: int) -> None:
        """Launch the copy of what is sent on from a buffer that is received into meanwhile."""
        if self.ring.aside_ns:
            what = f"copy pass={name} layer=0 hop={hop} packs={tensor}"
            self._launch(MERGE_KERNEL, self.ring.aside_ns, stream, what)

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


@dataclass(frozen=True)
class TeRing:
    """Transformer Engine's ring of one layer in a model, and in which way it is otherwise.

    Attributes:
        n_ranks: Ranks, which are also the hops.
        streams: Streams in which forward attention is by turns; backward it is in the first.
        kv_stream: Stream of the messages.
        n_buffers: Receive buffers: 2 overlap, 1 is a fault.
        sends_apart: Whether sending and receiving are kernels of their own in two streams.
        corrects_in_loop: Whether a small kernel corrects each hop's scale, in the stream of its attention.
        exchanges_heads: Whether two exchanges come before forward attention and one behind it, in another stream.
        gathers_weights: Whether a layer's weights are gathered beside its forward attention, in another stream.
        sends_behind: Whether backward a message leaves behind the attention of its own hop, not beside it.
        sends_ahead: Whether backward a message waits for no gradients.
        is_forward_only: Whether there is no backward pass.
    """

    n_ranks: int = 4
    streams: tuple[int, int] = (COMPUTE, SECOND)
    kv_stream: int = KV
    n_buffers: int = 2
    sends_apart: bool = False
    corrects_in_loop: bool = False
    exchanges_heads: bool = False
    gathers_weights: bool = False
    sends_behind: bool = False
    sends_ahead: bool = False
    is_forward_only: bool = False

    def but(self, **changes: object) -> TeRing:
        """Return the same with some changes."""
        return replace(self, **changes)

    def hosts(self) -> list[Host]:
        """Return the programs of all ranks."""
        return [_TeRank(self, rank).make() for rank in range(self.n_ranks)]


class _TeRank:
    def __init__(self, ring: TeRing, rank: int) -> None:
        self.ring, self.host = ring, Host(rank)
        self.before, self.after = (rank - 1) % ring.n_ranks, (rank + 1) % ring.n_ranks

    def make(self) -> Host:
        with self.host.scope("step"):
            for name, program in (("forward", self._forward), ("backward", self._backward)):
                if name == "backward" and self.ring.is_forward_only:
                    break
                self.host.launch(GEMM_KERNEL, 50_000)
                with self.host.scope(f"{name} layer=0"):
                    program()
                self.host.launch(GEMM_KERNEL, 50_000)
        return self.host

    def _forward(self) -> None:
        ring, last = self.ring, self.ring.n_ranks - 1
        if ring.exchanges_heads:
            self._exchange("q")
            self._exchange("kv")
        if ring.gathers_weights:
            self.host.record(_READY, COMPUTE)
            self.host.wait(_READY, DKV)
            self.host.launch(ALL_GATHER_KERNEL, 300_000, DKV)
        self._order(_READY, COMPUTE, ring.streams[1])
        for hop in range(ring.n_ranks):
            stream = ring.streams[hop % 2]
            if hop:
                self.host.wait(_KV_ARRIVED + hop - 1, stream)
            if hop < last and ring.n_buffers == 2:
                self._send("kv", "forward", hop, _KV_READ + hop - 1 if hop else _READY)
            self.host.launch(
                FORWARD_KERNEL, 500_000, stream, label=f"attention pass=forward layer=0 hop={hop}"
            )
            self.host.record(_KV_READ + hop, stream)
            if hop < last and ring.n_buffers == 1:
                self._send("kv", "forward", hop, _KV_READ + hop if hop else _READY)
            if ring.corrects_in_loop and hop:
                self.host.launch(MERGE_KERNEL, 2_000, ring.streams[(hop - 1) % 2])
        self._order(_KV_READ + last, ring.streams[1], COMPUTE)
        for hop in range(ring.n_ranks):
            self.host.launch(MERGE_KERNEL, 5_000, label=f"merge pass=forward layer=0 hop={hop}")
        if ring.exchanges_heads:
            self._exchange("out")

    def _exchange(self, tensor: str) -> None:
        others = tuple(rank for rank in range(self.ring.n_ranks) if rank != self.host.rank)
        _exchange(self.host, "forward", tensor, DKV, others)

    def _backward(self) -> None:
        ring, last = self.ring, self.ring.n_ranks - 1
        for hop in range(ring.n_ranks):
            tensor = "kv" if hop == 0 else "dkv" if hop == last else "kv+dkv"
            # With one buffer a message waits until attention has read the one before.
            is_behind = ring.sends_behind or (ring.n_buffers == 1 and hop > 0)
            if hop == 0 or not ring.sends_ahead:
                self.host.record(_SUMMED, COMPUTE)
            if not is_behind:
                self._send(tensor, "backward", hop, _SUMMED)
            self.host.launch(BACKWARD_KERNEL, 900_000, label=f"attention pass=backward layer=0 hop={hop}")
            if is_behind:
                self.host.record(_SUMMED, COMPUTE)
                self._send(tensor, "backward", hop, _SUMMED)
            self.host.wait(_KV_ARRIVED + hop, COMPUTE)
            self.host.launch(MERGE_KERNEL, 5_000, label=f"merge pass=backward layer=0 hop={hop}")

    def _send(self, tensor: str, name: str, hop: int, behind: int) -> None:
        """Launch a message, as one kernel or as two, behind an event."""
        what = f"send_recv pass={name} layer=0 hop={hop} tensor={tensor} bytes=64"
        stream, rank, arrived = self.ring.kv_stream, self.host.rank, _KV_ARRIVED + hop
        self.host.wait(behind, stream)
        if not self.ring.sends_apart:
            peers = tuple(sorted({self.before, self.after}))
            self.host.transfer(SEND_RECV_KERNEL, 400_000, stream, label=what, peers=peers)
            self.host.record(arrived, stream)
            return
        if hop:
            self.host.wait(arrived - 1, stream)
        self.host.transfer(SEND_RECV_KERNEL, 400_000, stream, label=f"{what} of={rank}", peers=(self.after,))
        self.host.wait(behind, DKV)
        self.host.transfer(
            SEND_RECV_KERNEL, 400_000, DKV, label=f"{what} of={self.before}", peers=(self.before,)
        )
        self.host.record(arrived, DKV)

    def _order(self, event: int, recorded_in: int, stream: int) -> None:
        """Make the streams of messages and another one wait for an event recorded just now."""
        self.host.record(event, recorded_in)
        self.host.wait(event, stream)
        self.host.wait(event, self.ring.kv_stream)


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
