#!/usr/bin/env python3
"""RDMA between PyTorch tensors of two processes, through libibverbs as C programs use it.

    doorbell run -- python3 tests/gpu/tensors.py           tensors of the first and the last GPU
    doorbell run -- python3 tests/gpu/tensors.py --host    the same with host memory, without PyTorch or a GPU

The address of `data_ptr()` is registered: the library must detect by itself that it is GPU memory.
One process writes a tensor into the other's, and reads one back; both are compared element by
element. The layouts are those of infiniband/verbs.h. Prints a line per case, and exits with 1 if
one has failed.
"""

import ctypes as c
import json
import random
import subprocess
import sys
import time

P, U8, U16, U32, U64, I32 = c.c_void_p, c.c_uint8, c.c_uint16, c.c_uint32, c.c_uint64, c.c_int32
LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ = 1, 2, 4
RESET_TO_INIT, INIT_TO_RTR, RTR_TO_RTS = 1, 2, 3
WRITE, READ, SIGNALED = 0, 4, 2
# Elements of a tensor, and the first element of the view that is sent.
CASES = [(dtype, count, skip) for dtype in ("float32", "bfloat16", "int64") for count, skip in ((1, 0), (1000, 3), (3 << 20, 1))]


def struct(name, fields):
    return type(name, (c.Structure,), {"_fields_": [(field, kind) for field, kind in fields]})


Cap = struct("Cap", [(n, U32) for n in ("send", "recv", "send_sge", "recv_sge", "inline")])
Init = struct("Init", [("own", P), ("send_cq", P), ("recv_cq", P), ("srq", P), ("cap", Cap), ("kind", I32), ("sig_all", I32)])
# The GID as two words, for alignment.
Ah = struct("Ah", [("gid", U64 * 2), ("flow", U32), ("sgid", U8), ("hops", U8), ("tclass", U8), ("dlid", U16), ("sl", U8), ("bits", U8), ("rate", U8), ("global_", U8), ("port", U8)])
Attr = struct(
    "Attr",
    [(n, I32) for n in ("state", "current", "mtu", "migration")]
    + [(n, U32) for n in ("qkey", "rq_psn", "sq_psn", "peer", "access")]
    + [("cap", Cap), ("ah", Ah), ("alternate", Ah), ("pkey", U16), ("alternate_pkey", U16)]
    + [(n, U8) for n in ("notify", "draining", "rd", "dest_rd", "rnr_timer", "port", "timeout", "retries", "rnr_retries", "alternate_port", "alternate_timeout")]
    + [("limit", U32)],
)
Sge = struct("Sge", [("address", U64), ("length", U32), ("key", U32)])
# The RDMA variant of the union, padded to the union's size.
Send = struct("Send", [("id", U64), ("next", P), ("list", c.POINTER(Sge)), ("count", I32), ("opcode", I32), ("flags", U32), ("imm", U32), ("remote", U64), ("rkey", U32), ("room", U8 * 76)])
Done = struct("Done", [("id", U64), ("status", I32), ("opcode", I32), ("rest", U8 * 32)])
Mr = struct("Mr", [("context", P), ("pd", P), ("address", P), ("length", c.c_size_t), ("handle", U32), ("lkey", U32), ("rkey", U32)])
Qp = struct("Qp", [("context", P), ("own", P), ("pd", P), ("send_cq", P), ("recv_cq", P), ("srq", P), ("handle", U32), ("number", U32)])
Context = struct("Context", [("device", P), ("ops", P * 32)])
assert c.sizeof(Send) == 128 and c.sizeof(Done) == 48 and c.sizeof(Ah) == 32


class End:
    """A queue pair of the first device, with a protection domain and a completion queue."""

    def __init__(self):
        self.lib = lib = c.CDLL("libibverbs.so.1", use_errno=True)
        for name in ("get_device_list", "open_device", "alloc_pd", "create_cq", "create_qp", "reg_mr"):
            getattr(lib, "ibv_" + name).restype = P
        count = I32()
        devices = lib.ibv_get_device_list(c.byref(count))
        if not devices or count.value == 0:
            sys.exit("no RDMA device: start it by doorbell run")
        self.context = self.check(lib.ibv_open_device(P(P.from_address(devices).value)), "ibv_open_device")
        self.pd = self.check(lib.ibv_alloc_pd(P(self.context)), "ibv_alloc_pd")
        self.cq = self.check(lib.ibv_create_cq(P(self.context), 16, None, None, 0), "ibv_create_cq")
        init = Init(send_cq=self.cq, recv_cq=self.cq, cap=Cap(16, 16, 1, 1, 0), kind=2)
        self.qp = self.check(lib.ibv_create_qp(P(self.pd), c.byref(init)), "ibv_create_qp")
        ops = Context.from_address(self.context).ops
        self.poll_cq = c.CFUNCTYPE(I32, P, I32, P)(ops[11])
        self.post_send = c.CFUNCTYPE(I32, P, P, P)(ops[25])
        gid = (U64 * 2)()
        # Index 0 is RoCE v2 on the userspace device; on other adapters it may not be.
        if lib.ibv_query_gid(P(self.context), U8(1), 0, c.byref(gid)):
            sys.exit("ibv_query_gid failed")
        self.endpoint = {"qpn": Qp.from_address(self.qp).number, "gid": list(gid)}

    def check(self, made, call):
        if not made:
            sys.exit(f"{call}: errno {c.get_errno()}")
        return made

    def register(self, address, length):
        access = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ
        return Mr.from_address(self.check(self.lib.ibv_reg_mr(P(self.pd), P(address), c.c_size_t(length), access), "ibv_reg_mr"))

    def deregister(self, mr):
        if self.lib.ibv_dereg_mr(c.byref(mr)):
            sys.exit("ibv_dereg_mr failed")

    def connect(self, peer):
        def modify(attr, mask, to):
            answer = self.lib.ibv_modify_qp(P(self.qp), c.byref(attr), mask)
            if answer:
                sys.exit(f"ibv_modify_qp to {to}: errno {answer}")

        modify(Attr(state=RESET_TO_INIT, port=1, access=REMOTE_WRITE | REMOTE_READ), 1 | 1 << 3 | 1 << 4 | 1 << 5, "INIT")
        ah = Ah(gid=(U64 * 2)(*peer["gid"]), hops=64, global_=1, port=1)
        mask = 1 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 15 | 1 << 17 | 1 << 20
        modify(Attr(state=INIT_TO_RTR, ah=ah, mtu=3, peer=peer["qpn"], dest_rd=1, rnr_timer=12), mask, "RTR")
        mask = 1 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 13 | 1 << 16
        modify(Attr(state=RTR_TO_RTS, timeout=14, retries=7, rnr_retries=7, rd=1), mask, "RTS")

    def move(self, opcode, mr, address, length, remote):
        sge = Sge(address, length, mr.lkey)
        request = Send(list=c.pointer(sge), count=1, opcode=opcode, flags=SIGNALED, remote=remote["address"], rkey=remote["rkey"])
        bad = P()
        answer = self.post_send(self.qp, c.addressof(request), c.addressof(bad))
        if answer:
            sys.exit(f"ibv_post_send: errno {answer}")
        done = Done()
        until = time.monotonic() + 60
        while self.poll_cq(self.cq, 1, c.addressof(done)) == 0:
            if time.monotonic() > until:
                sys.exit("nothing completed")
        if done.status:
            sys.exit(f"a request failed: status {done.status} of ibv_wc")


class HostMemory:
    """Host bytes in place of a tensor."""

    SIZES = {"float32": 4, "bfloat16": 2, "int64": 8}

    def __init__(self, dtype, count, seed):
        self.size = self.SIZES[dtype]
        content = random.Random(seed).randbytes(count * self.size) if seed else bytes(count * self.size)
        self.bytes = (c.c_char * len(content)).from_buffer_copy(content)

    def place(self, skip):
        return c.addressof(self.bytes) + skip * self.size, len(self.bytes) - skip * self.size

    def equals(self, other, skip):
        return self.bytes.raw[skip * self.size :] == other.bytes.raw[skip * self.size :]


class Tensor:
    """A GPU tensor."""

    device = None

    def __init__(self, dtype, count, seed):
        import torch

        kind = getattr(torch, dtype)
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(-1000, 1000, (count,), generator=generator) if seed else torch.zeros(count)
        self.tensor = values.to(kind).to(self.device)
        torch.cuda.synchronize(self.device)

    def place(self, skip):
        view = self.tensor[skip:]
        return view.data_ptr(), view.numel() * view.element_size()

    def equals(self, other, skip):
        import torch

        return torch.equal(self.tensor[skip:].cpu(), other.tensor[skip:].cpu())


def memory(host, which):
    if host:
        return HostMemory
    try:
        import torch
    except ImportError:
        sys.exit("no PyTorch here: --host does the same with the host's memory")
    if not torch.cuda.is_available():
        sys.exit("PyTorch finds no GPU: --host does the same with the host's memory")
    Tensor.device = f"cuda:{which % torch.cuda.device_count()}"
    return Tensor


def say(stream, value):
    stream.write(json.dumps(value) + "\n")
    stream.flush()


def hear(stream):
    line = stream.readline()
    if not line:
        sys.exit("the other process has ended")
    return json.loads(line)


def target(host):
    """The target process: it reports its addresses, and whether the received data is right."""
    make, end = memory(host, -1), End()
    say(sys.stdout, end.endpoint)
    end.connect(hear(sys.stdin))
    for number, (dtype, count, skip) in enumerate(CASES):
        into, source = make(dtype, count, 0), make(dtype, count, 2 * number + 2)
        places = [held.place(min(skip, count - 1)) for held in (into, source)]
        regions = [end.register(*place) for place in places]
        say(sys.stdout, [{"address": place[0], "rkey": mr.rkey} for place, mr in zip(places, regions)])
        hear(sys.stdin)
        say(sys.stdout, into.equals(make(dtype, count, 2 * number + 1), min(skip, count - 1)))
        for mr in regions:
            end.deregister(mr)


def initiator(host):
    arguments = [sys.executable, __file__, "--target"] + (["--host"] if host else [])
    other = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    make, end = memory(host, 0), End()
    end.connect(hear(other.stdout))
    say(other.stdin, end.endpoint)
    failed = 0
    for number, (dtype, count, skip) in enumerate(CASES):
        skip = min(skip, count - 1)
        source, back = make(dtype, count, 2 * number + 1), make(dtype, count, 0)
        there = hear(other.stdout)
        for held, opcode, remote in ((source, WRITE, there[0]), (back, READ, there[1])):
            address, length = held.place(skip)
            mr = end.register(address, length)
            end.move(opcode, mr, address, length, remote)
            end.deregister(mr)
        say(other.stdin, "moved")
        written = hear(other.stdout)
        read = back.equals(make(dtype, count, 2 * number + 2), skip)
        for what, right in (("written", written), ("read", read)):
            failed += not right
            print(f"{'PASS' if right else 'FAIL'} {count - skip} elements of {dtype} {what}", flush=True)
    other.stdin.close()
    if other.wait() or failed:
        sys.exit(1)


if __name__ == "__main__":
    (target if "--target" in sys.argv else initiator)("--host" in sys.argv)
