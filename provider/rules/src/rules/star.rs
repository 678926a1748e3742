//! StaR, if a capability says so: B61 and B62.

use starverbs_queues::board::*;
use starverbs_queues::{SendOp, SendWqe, WcStatus};
use zerocopy::IntoBytes;

use super::optional::needs;
use crate::bench::Bench;
use crate::fault::{Tested, expect};
use crate::qp::{RawQp, UC, data, request};
use crate::raw::{Basics, DATA, QP_BYTES, QPS, RawDriver};

const EINVAL: u32 = libc::EINVAL as u32;
const EOPNOTSUPP: u32 = libc::EOPNOTSUPP as u32;

/// What the ends of a StaR connection are.
const ENDS: [u32; 2] = [STAR_STATELESS, STAR_STATEFUL];

/// A queue pair that is to be this.
fn create(raw: &RawDriver, of: Basics, n: usize, star: u32) -> CreateQp {
    let plain = RawDriver::create_qp(of.pd, of.cq.number, raw.at(QPS + n * QP_BYTES));
    CreateQp { flags: plain.flags | QP_STAR, star: star as u8, ..plain }
}

/// Two of them, connected to each other.
fn connected(raw: &mut RawDriver, of: Basics, stars: [u32; 2]) -> Tested<[RawQp; 2]> {
    let [a, b] = [0, 1].map(|n| create(raw, of, n, stars[n]));
    let (a, b) = (raw.qp_of(0, &a)?, raw.qp_of(1, &b)?);
    raw.connect_qp(a, b.qpn)?;
    raw.connect_qp(b, a.qpn)?;
    Ok([a, b])
}

fn info(raw: &mut RawDriver, qp: RawQp) -> Tested<StarReply> {
    raw.ask(OP_STAR_QUERY, Object { number: qp.qpn, reserved: 0 }.as_bytes())
}

/// What they have become, once that is settled.
fn roles(raw: &mut RawDriver, qps: [RawQp; 2], of: [u32; 2]) -> Tested {
    raw.wait("the roles of a StaR connection", |raw| {
        let roles = [info(raw, qps[0])?.role, info(raw, qps[1])?.role];
        Ok((roles == of).then_some(()))
    })
}

/// A message each way, a WRITE and a READ.
fn carries(raw: &mut RawDriver, key: u32, [a, b]: &mut [RawQp; 2]) -> Tested {
    for n in 0..4 {
        raw.exchange(key, a, b, 2 * n)?;
        raw.exchange(key, b, a, 2 * n + 1)?;
    }
    for (n, op) in [SendOp::Write, SendOp::Read].into_iter().enumerate() {
        raw.put(DATA + 64 * n, &[n as u8 + 1; 64]);
        let there = data(8192 + 64 * n, 64, key);
        raw.put(DATA + 8192 + 64 * n, &[n as u8 + 5; 64]);
        let wqe = SendWqe { remote_addr: there.addr, rkey: key, ..request(op, 50) };
        raw.put_send(a, wqe, data(64 * n, 64, key));
        raw.doorbell(a)?;
        expect("status of an operation", raw.completion()?.status, WcStatus::Success)?;
        let (here, there) = (raw.bytes(DATA + 64 * n, 64), raw.bytes(DATA + 8192 + 64 * n, 64));
        expect("its bytes at both ends", here, there)?;
    }
    Ok(())
}

pub(super) fn ends(bench: &mut Bench) -> Tested {
    let mut raw = bench.open()?;
    needs(&mut raw, CAP_STAR, "CAP_STAR")?;
    let of = raw.basics()?;
    let wild = create(&raw, of, 0, 9);
    let done = raw.command::<NumberReply>(OP_CREATE_QP, wild.as_bytes())?.map(drop);
    expect("status of a preference that there is not", done, Err(EINVAL))?;
    let unreliable = CreateQp { kind: UC, ..create(&raw, of, 0, STAR_AUTO) };
    let done = raw.command::<NumberReply>(OP_CREATE_QP, unreliable.as_bytes())?.map(drop);
    expect("status of StaR for UC", done, Err(EOPNOTSUPP))?;
    let mut qps = connected(&mut raw, of, ENDS)?;
    roles(&mut raw, qps, ENDS)?;
    let mut told = [raw.wait_for_event(0)?, raw.wait_for_event(1)?].map(|event| (event.kind, event.number));
    told.sort_unstable();
    let mut wanted = qps.map(|qp| (EVENT_STAR, qp.qpn));
    wanted.sort_unstable();
    expect("events of what they have become", told, wanted)?;
    carries(&mut raw, of.key, &mut qps)?;
    let infos = [info(&mut raw, qps[0])?, info(&mut raw, qps[1])?];
    expect("what they are to be", infos.map(|info| info.preference), ENDS)?;
    expect("bytes on chip of the stateless end", infos[0].card_bytes, 0)?;
    raw.done(OP_DESTROY_QP, qps[1].qpn)?;
    raw.done(OP_DESTROY_QP, qps[0].qpn)
}

/// The status of another role.
fn set(raw: &mut RawDriver, qpn: u32, role: u32) -> Tested<Result<(), u32>> {
    Ok(raw.command::<Object>(OP_STAR_SET_ROLE, StarRole { qpn, role }.as_bytes())?.map(drop))
}

pub(super) fn changes(bench: &mut Bench) -> Tested {
    let mut raw = bench.open()?;
    needs(&mut raw, CAP_STAR, "CAP_STAR")?;
    let of = raw.basics()?;
    let plain = raw.qp(of.pd, of.cq.number, 2)?;
    let mut qps = connected(&mut raw, of, [STAR_AUTO; 2])?;
    roles(&mut raw, qps, [STAR_PLAIN; 2])?;
    carries(&mut raw, of.key, &mut qps)?;
    expect("status of a role that there is not", set(&mut raw, qps[0].qpn, 9)?, Err(EINVAL))?;
    let none = set(&mut raw, 0xff_fff0, STAR_AUTO)?;
    expect("status of a queue pair that there is not", none, Err(EINVAL))?;
    let without = set(&mut raw, plain.qpn, STAR_AUTO)?;
    expect("status of a queue pair that was made without", without, Err(EOPNOTSUPP))?;
    for (qp, role) in qps.into_iter().zip(ENDS) {
        expect("status of another role", set(&mut raw, qp.qpn, role)?, Ok(()))?;
    }
    roles(&mut raw, qps, ENDS)?;
    carries(&mut raw, of.key, &mut qps)
}
