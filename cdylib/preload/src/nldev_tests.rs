//! Requests as rdma(8) sends them, and such as no program should send.

use std::convert::Infallible;

use starverbs_core::rng::SplitMix64;

use super::*;
use crate::sysfs_view::tests::facts;

/// The asking program's netlink port.
const TO: u32 = 4711;
const SEQUENCE: u32 = 77;

/// A request with attributes of four bytes.
fn request(kind: u16, flags: u16, attributes: &[(u16, u32)]) -> Vec<u8> {
    let mut message = NetlinkMessage::new(kind, flags | REQUEST, SEQUENCE, 0).raw(&[]);
    for (kind, value) in attributes {
        message = message.put(*kind, &value.to_ne_bytes());
    }
    message.0
}

/// All that is sent in answer.
fn answers(requests: &[u8], facts: Option<&Facts>) -> Vec<Vec<u8>> {
    let mut sent = Vec::new();
    let done = answer(requests, TO, facts, |message| {
        sent.push(message.to_vec());
        Ok::<(), Infallible>(())
    });
    assert_eq!(done, Ok(()));
    for message in &sent {
        assert_eq!(u32_at(message, 0), Some(message.len() as u32));
        assert_eq!(u32_at(message, 12), Some(TO));
    }
    sent
}

/// Types and flags of messages, with what NLMSG_DONE and NLMSG_ERROR say, in that order.
fn outline(messages: &[Vec<u8>]) -> Vec<(u16, u16, i32)> {
    let code = |message: &[u8]| match u16_at(message, 4).map(i32::from) {
        Some(libc::NLMSG_DONE | libc::NLMSG_ERROR) => u32_at(message, HEADER).unwrap_or(0) as i32,
        _ => 0,
    };
    let outline = |message: &Vec<u8>| {
        assert_eq!(u32_at(message, 8), Some(SEQUENCE));
        (u16_at(message, 4).unwrap_or(0), u16_at(message, 6).unwrap_or(0), code(message))
    };
    messages.iter().map(outline).collect()
}

/// The value of an attribute of a message.
fn value(message: &[u8], of: u16) -> Option<&[u8]> {
    let mut rest = &message[HEADER..];
    while !rest.is_empty() {
        let length = usize::from(u16_at(rest, 0)?);
        if u16_at(rest, 2)? == of {
            return Some(&rest[ATTRIBUTE..length]);
        }
        rest = &rest[length.next_multiple_of(4)..];
    }
    None
}

const DONE: u16 = libc::NLMSG_DONE as u16;
const ERROR: u16 = libc::NLMSG_ERROR as u16;

#[test]
fn a_dump_of_devices_names_ours() {
    let facts = facts();
    let sent = answers(&request(GET, ACK | DUMP, &[]), Some(&facts));
    assert_eq!(outline(&sent), [(GET, MULTI, 0), (DONE, MULTI, 0)]);
    let device = &sent[0];
    assert_eq!(value(device, attr::DEV_INDEX), Some(&0u32.to_ne_bytes()[..]));
    assert_eq!(value(device, attr::DEV_NAME), Some(&b"star0\0"[..]));
    assert_eq!(value(device, attr::PORT_INDEX), Some(&1u32.to_ne_bytes()[..]));
    assert_eq!(value(device, attr::NODE_TYPE), Some(&[1][..]));
    assert_eq!(value(device, attr::NODE_GUID), Some(&0x0123_4567_89ab_cdef_u64.to_ne_bytes()[..]));
    assert_eq!(value(device, attr::PROTOCOL), Some(&b"roce\0"[..]));
    assert_eq!(outline(&answers(&request(GET, DUMP, &[]), None)), [(DONE, MULTI, 0)], "no device");
}

#[test]
fn one_device_is_named_by_its_index() {
    let facts = facts();
    let ask = |attributes: &[(u16, u32)]| outline(&answers(&request(GET, ACK, attributes), Some(&facts)));
    assert_eq!(ask(&[(attr::DEV_INDEX, 0)]), [(GET, 0, 0), (ERROR, CAPPED, 0)]);
    assert_eq!(ask(&[(attr::DEV_INDEX, 1)]), [(ERROR, CAPPED, -libc::EINVAL)]);
    assert_eq!(ask(&[]), [(ERROR, CAPPED, -libc::EINVAL)]);
    let nested = attr::DEV_INDEX | 0x8000;
    assert_eq!(ask(&[(attr::DEV_INDEX, 9), (500, 1), (nested, 0)])[0], (GET, 0, 0), "the last counts");
}

#[test]
fn a_link_names_the_interface_behind_the_first_address() {
    let mut facts = facts();
    facts.device.gids.remove(0);
    let one = [(attr::DEV_INDEX, 0), (attr::PORT_INDEX, 1)];
    let sent = answers(&request(PORT_GET, ACK, &one), Some(&facts));
    assert_eq!(outline(&sent), [(PORT_GET, 0, 0), (ERROR, CAPPED, 0)]);
    assert_eq!(value(&sent[0], attr::PORT_STATE), Some(&[4][..]));
    assert_eq!(value(&sent[0], attr::PORT_PHYS_STATE), Some(&[5][..]));
    assert_eq!(value(&sent[0], attr::NDEV_INDEX), Some(&2u32.to_ne_bytes()[..]));
    assert_eq!(value(&sent[0], attr::NDEV_NAME), Some(&b"eth0\0"[..]), "not its alias");
    facts.device.gids.clear();
    assert_eq!(value(&answers(&request(PORT_GET, 0, &one), Some(&facts))[0], attr::NDEV_NAME), None);

    let ask =
        |flags, attributes: &[_]| outline(&answers(&request(PORT_GET, flags, attributes), Some(&facts)));
    assert_eq!(ask(0, &[(attr::DEV_INDEX, 0), (attr::PORT_INDEX, 2)]), [(ERROR, CAPPED, -libc::EINVAL)]);
    assert_eq!(ask(0, &[(attr::DEV_INDEX, 0)]), [(ERROR, CAPPED, -libc::EINVAL)]);
    assert_eq!(ask(DUMP, &[(attr::DEV_INDEX, 0)]), [(PORT_GET, MULTI, 0), (DONE, MULTI, 0)]);
    assert_eq!(ask(DUMP, &[(attr::DEV_INDEX, 5)]), [(DONE, MULTI, -libc::ENODEV)]);
}

#[test]
fn what_is_not_offered_is_refused_and_what_asks_nothing_is_passed_over() {
    let facts = facts();
    let ask = |bytes: &[u8]| outline(&answers(bytes, Some(&facts)));
    let sent = answers(&request(SYS_GET, ACK, &[]), None);
    assert_eq!(value(&sent[0], attr::SYS_COPY_ON_FORK), Some(&[1][..]));
    let refused = [(ERROR, CAPPED, -libc::EOPNOTSUPP)];
    for kind in [SYS_GET, NLDEV | 3, NLDEV | 9, NLDEV | 1023, 4 << 10, FIRST_REQUEST, u16::MAX] {
        assert_eq!(ask(&request(kind, DUMP, &[])), refused, "{kind}");
    }
    assert_eq!(ask(&request(2, 0, &[])), []);
    assert_eq!(ask(&request(2, ACK | DUMP, &[])), [(ERROR, CAPPED, 0)]);
    let mut answer = request(GET, DUMP, &[]);
    answer[6] &= !(REQUEST as u8);
    assert_eq!(ask(&answer), []);
    let two = [request(GET, DUMP, &[]), request(SYS_GET, 0, &[])].concat();
    assert_eq!(ask(&two), [(GET, MULTI, 0), (DONE, MULTI, 0), (SYS_GET, 0, 0)]);
}

#[test]
fn lengths_that_lie_are_not_believed() {
    let facts = facts();
    let whole = request(PORT_GET, ACK, &[(attr::DEV_INDEX, 0), (attr::PORT_INDEX, 1)]);
    for length in (0..whole.len()).chain([whole.len() + 1, 1 << 20, 1 << 31, u32::MAX as usize]) {
        // The message says it is shorter or longer than it is.
        let mut lying = whole.clone();
        lying[..4].copy_from_slice(&(length as u32).to_ne_bytes());
        let sent = answers(&lying, Some(&facts));
        assert!(sent.first().is_none_or(|first| u16_at(first, 4) == Some(ERROR)), "{length}");
        assert_eq!(sent.is_empty(), !(HEADER..=whole.len()).contains(&length), "{length}");
        // It is cut short.
        assert_eq!(answers(&whole[..length.min(whole.len() - 1)], Some(&facts)), Vec::<Vec<u8>>::new());
        // Its first attribute lies.
        let mut lying = whole.clone();
        lying[HEADER..HEADER + 2].copy_from_slice(&(length as u16).to_ne_bytes());
        let sent = answers(&lying, Some(&facts));
        let error = outline(&sent)[0].2;
        assert!(error == -libc::EINVAL || error == -libc::ERANGE || length == 8, "{length}");
    }
}

#[test]
fn noise_is_answered_in_bounded_length() {
    let facts = facts();
    let mut rng = SplitMix64::new(1);
    let mut random = || rng.bits();
    for _ in 0..20_000 {
        let mut bytes: Vec<u8> = (0..random() % 200).map(|_| random() as u8).collect();
        if random() % 2 == 0 && bytes.len() >= HEADER {
            // A header that leads further.
            let length = (random() % 256) as u32;
            bytes[..4].copy_from_slice(&length.to_ne_bytes());
            bytes[4..6].copy_from_slice(&(NLDEV | (random() % 8) as u16).to_ne_bytes());
            bytes[6] |= REQUEST as u8;
        }
        let sent = answers(&bytes, Some(&facts));
        assert!(sent.len() <= 2 * (bytes.len() / HEADER));
        assert!(sent.iter().all(|message| message.len() < 512));
    }
}

#[test]
fn nothing_is_sent_after_a_send_that_failed() {
    let requests = request(GET, DUMP, &[]).repeat(100);
    let mut tries = 0;
    let done = answer(&requests, TO, Some(&facts()), |_| {
        tries += 1;
        if tries < 4 { Ok(()) } else { Err(tries) }
    });
    assert_eq!((done, tries), (Err(4), 4));
}
