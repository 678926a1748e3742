use std::slice;

use starverbs_core::Seg;

use super::*;
use crate::program::Payload;

/// Where frames come from.
fn host() -> HostAddr {
    let name = "lo".to_owned();
    HostAddr { gid: Gid::default(), ifindex: 0, link_mtu: 65536, name, loopback: true }
}

/// A frame of a header and the program's bytes.
fn add(batch: &mut FrameBatch, group: &FrameGroup, header: &[u8], program: &[u8]) -> u16 {
    let segs = [Seg { addr: program.as_ptr() as u64, len: program.len() as u32 }];
    let index = batch.place(group, header.len() + program.len(), true);
    batch.copy(header);
    let (mut crc, mut right) = (Crc::new(), Crc::new());
    // SAFETY: a static, or a vector that outlives the frame.
    for bytes in unsafe { Payload::new(&segs) }.iter() {
        batch.gather(bytes, &mut crc);
    }
    right.update(program);
    assert_eq!(crc.value(), right.value());
    index
}

/// Bytes at an address that the kernel was given.
fn bytes_at(at: *const libc::c_void, len: usize) -> Vec<u8> {
    if len == 0 {
        return Vec::new();
    }
    // SAFETY: the batch said so; the tests write nowhere meanwhile.
    unsafe { slice::from_raw_parts(at.cast(), len) }.to_vec()
}

/// What the kernel reads of message `at`, which is sealed: its address, control messages and bytes.
fn as_the_kernel_reads(batch: &FrameBatch, at: usize) -> (Vec<u8>, Vec<u8>, Vec<u8>) {
    let header = &batch.headers[at].msg_hdr;
    /* their types differ between C libraries */
    let (iovs, control): (usize, usize) = (header.msg_iovlen as _, header.msg_controllen as _);
    // SAFETY: `seal` wrote where the IOVs are and how many.
    let iovs = unsafe { slice::from_raw_parts(header.msg_iov, iovs) };
    let bytes = iovs.iter().flat_map(|iov| bytes_at(iov.iov_base, iov.iov_len)).collect();
    let name = bytes_at(header.msg_name, header.msg_namelen as usize);
    (name, bytes_at(header.msg_control, control), bytes)
}

/// Frames to several blocks in turn: one message a block, each frame's bytes in the order in which they
/// were added.
#[test]
fn frames_to_several_blocks_join_the_newest_message_of_theirs() {
    let mut batch = FrameBatch::new().unwrap();
    let group = |block| FrameGroup { block, ..FrameGroup::default() };
    let mut add = |block: u32, bytes: &[u8]| {
        let index = batch.place(&group(block), bytes.len(), true);
        batch.copy(&bytes[..4]);
        batch.copy(&bytes[4..]);
        assert_eq!(batch.last_frame(bytes.len()), bytes);
        index
    };
    /* blocks 3 and 131 share a place in the list of the newest; a shorter frame ends a message */
    let placed = [
        (3, &b"frame-a1"[..]),
        (4, b"frame-b1"),
        (3, b"frame-a2"),
        (131, b"frame-c1"),
        (3, b"frame-a3"),
        (4, b"short"),
        (4, b"frame-b2"),
        (3, b"frame-a4"),
    ]
    .map(|(block, bytes)| add(block, bytes));
    assert_eq!(placed, [0, 0, 1, 0, 0, 1, 0, 1]);
    batch.seal(&[host()]);
    let read = |at: usize, index| {
        let mut room = [0; 64];
        let len = batch.read_frame(at, index, &mut room);
        String::from_utf8(room[..len].to_vec()).unwrap()
    };
    let frames = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0), (3, 1), (4, 0)];
    let expected =
        ["frame-a1", "frame-a2", "frame-b1", "short", "frame-c1", "frame-a3", "frame-a4", "frame-b2"];
    assert_eq!(frames.map(|(at, index)| read(at, index)), expected);
}

/// Messages of several groups under way at once, gathered and copied, for as many rounds as there are.
#[test]
fn the_kernel_finds_what_was_placed() {
    let mut batch = FrameBatch::new().unwrap();
    let program: Vec<u8> = (0..9000u32).map(|n| n as u8).collect();
    for round in 0..3 {
        let group = |block| FrameGroup {
            block,
            port: 4791,
            traffic_class: round,
            hop_limit: HOPS,
            ..FrameGroup::default()
        };
        for (block, index) in [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2)] {
            let from = usize::from(index) * 100;
            assert_eq!(add(&mut batch, &group(block), b"head", &program[from..][..60]), index);
        }
        assert_eq!(add(&mut batch, &group(3), b"long", &program), 0);
        batch.seal(&[host()]);
        let part = |index: usize| [b"head", &program[index * 100..][..60]].concat();
        let expected = [[part(0), part(1), part(2)].concat(), [part(0), part(1)].concat()];
        let messages: [_; 3] = std::array::from_fn(|at| as_the_kernel_reads(&batch, at));
        assert_eq!(messages[0].2, expected[0]);
        assert_eq!(messages[1].2, expected[1]);
        assert_eq!(messages[2].2, [b"long", &program[..]].concat());
        for (at, (name, control, bytes)) in messages.iter().enumerate() {
            assert_eq!(*name, messages[0].0, "all go to one address");
            assert_eq!(control.is_empty(), round == 0 && at == 2, "segments, or a traffic class");
            let mut whole = vec![0; MAX_FRAME];
            let len = batch.read_frame(at, 0, &mut whole);
            assert_eq!(whole[..len], bytes[..len]);
        }
        batch.clear();
        assert!(batch.is_empty() && batch.has_room());
    }
}

#[test]
fn a_copied_frame_is_the_batchs_own() {
    let mut batch = FrameBatch::new().unwrap();
    let mut program = *b"payload";
    let at = program.as_mut_ptr();
    let segs = [Seg { addr: at as u64, len: 7 }];
    // SAFETY: the array outlives the batch.
    let bytes = unsafe { Payload::new(&segs) }.iter().next().unwrap();
    batch.place(&FrameGroup::default(), 11, true);
    batch.copy(b"head");
    assert_eq!(batch.copy_program(bytes), b"payload");
    // SAFETY: the array's first byte, to which nobody has a reference.
    unsafe { at.write(b'P') };
    assert_eq!(batch.last_frame(11), b"headpayload");
    batch.place(&FrameGroup { block: 9, ..FrameGroup::default() }, 5, true);
    batch.room(5).copy_from_slice(b"whole");
    batch.seal(&[host()]);
    assert_eq!(as_the_kernel_reads(&batch, 1).2, b"whole");
}
