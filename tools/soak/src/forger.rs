//! Somebody on the wire who reads all of it and knows all but the key: he says again, or otherwise, what ends
//! of StaR say to each other. He also has data come for connections that he has no token for.

use starverbs_core::Psn;
use starverbs_sim::{Forger, Rng, StarFrame};
use starverbs_star::control::{Control, MAX_CONTROL};
use starverbs_star::token::TOKEN_LEN;
use starverbs_star::wire::{CRC_LEN, Crc, HEADER_LEN, PORT_STATELESS, PREFIX_LEN, fill_checksum};

/// The latest that he is, ns.
const LATE: u64 = 4_000;

/// One who does what a seed has him do.
pub(crate) fn forger(seed: u64) -> Forger {
    let (mut rng, mut kept) = (Rng::new(seed ^ 0xbad), Vec::new());
    Box::new(move |seen| {
        let frame = forge(&mut rng, &mut kept, seen)?;
        Some((rng.below(LATE), frame))
    })
}

/// A frame, now that this one passes; its checksums are right. `kept`: those with control messages so far.
fn forge(rng: &mut Rng, kept: &mut Vec<StarFrame>, seen: &StarFrame) -> Option<StarFrame> {
    let control = seen.bytes[0] & 2 != 0;
    if control {
        kept.push(seen.clone());
    }
    if seen.path.dport == PORT_STATELESS && rng.chance(0.1) {
        return Some(misname(rng, seen));
    }
    if kept.is_empty() || !rng.chance(if control { 0.7 } else { 0.05 }) {
        return None;
    }
    let mut frame = kept[rng.below(kept.len() as u64) as usize].clone();
    let body = frame.bytes.len() - CRC_LEN;
    match rng.below(4) {
        /* as it was */
        0 => return Some(frame),
        /* changed */
        1 => frame.bytes[20 + rng.below(body as u64 - 20) as usize] ^= 1 << rng.below(8),
        /* as if it were the next, or an answer */
        2 => frame.bytes[7] = frame.bytes[7].wrapping_add(1),
        _ => speak(rng, &mut frame),
    }
    sign(&mut frame);
    Some(frame)
}

/// Data for another connection than that which its token is of, or under another token.
fn misname(rng: &mut Rng, seen: &StarFrame) -> StarFrame {
    let mut frame = seen.clone();
    let bit = rng.below(8 * (PREFIX_LEN + TOKEN_LEN) as u64) as usize;
    frame.bytes[HEADER_LEN + bit / 8] ^= 1 << (bit % 8);
    /* the header has the low byte of the epoch, too */
    frame.bytes[4] = frame.bytes[HEADER_LEN + PREFIX_LEN - 1];
    sign(&mut frame);
    frame
}

/// A message of his own, which is not sealed, in place of what a frame had.
fn speak(rng: &mut Rng, frame: &mut StarFrame) {
    let says = rng.pick(&[
        Control::Bye { why: 10, recvs: Psn::default() },
        Control::Unrule { key: 1 },
        Control::Want { upto: 9 },
    ]);
    let mut room = [0; MAX_CONTROL];
    let len = says.encode(&mut room).expect("it fits");
    frame.bytes.truncate(28);
    frame.bytes[0] = 0x13;
    frame.bytes[16..18].copy_from_slice(&(len as u16).to_be_bytes());
    frame.bytes[7] = rng.below(4) as u8;
    frame.bytes.extend_from_slice(&room[..len]);
    frame.bytes.extend([0; CRC_LEN]);
}

/// The checksums of a frame that was changed.
fn sign(frame: &mut StarFrame) {
    let body = frame.bytes.len() - CRC_LEN;
    fill_checksum(&frame.path, &mut frame.bytes);
    let mut crc = Crc::new();
    crc.update(&frame.bytes[..body]);
    frame.bytes[body..].copy_from_slice(&crc.finish());
}
