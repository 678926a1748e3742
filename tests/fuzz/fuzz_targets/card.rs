//! Frames into a card with a live connection, with the connection's own QPN and PSNs nearby: whatever they ask for, the card
//! does not panic, writes only where its program let it, and at most this QP breaks.
#![no_main]

#[path = "../../../provider/sim/tests/common/pair.rs"]
#[allow(dead_code)]
mod pair;

use libfuzzer_sys::fuzz_target;
use pair::Pair;
use starverbs_core::{FrameMeta, QpState, QpType};
use starverbs_sim::Setup;

fuzz_target!(|input: (bool, Vec<(u8, u8, Vec<u8>)>)| {
    let (reliable, frames) = input;
    let qp_type = if reliable { QpType::Rc } else { QpType::Uc };
    let mut p = Pair::of(qp_type, &Setup::default());
    let meta = FrameMeta { src: p.net.hosts[0].gid, dst: p.net.hosts[1].gid, ..Default::default() };
    p.post_recv(100, 64);
    for (opcode, psn, rest) in frames.into_iter().take(64) {
        let mut bytes = vec![opcode, 0x40, 0xff, 0xff];
        bytes.extend(p.qpn[1].to_be_bytes());
        bytes.extend((1 << 31 | u32::from(psn % 8)).to_be_bytes());
        bytes.extend(rest);
        bytes.truncate(bytes.len() & !3);
        let now = p.net.now();
        let host = &mut p.net.hosts[1];
        host.nic.handle_frame(&mut host.env, now, &meta, &bytes);
    }
    assert!(p.net.run_until_idle(1_000_000), "the card comes to rest");
    assert!(matches!(p.states()[1], QpState::Rts | QpState::Err));
    assert!(p.net.hosts[1].env.memory.gaps_intact(), "nothing was written beside the buffers");
});
