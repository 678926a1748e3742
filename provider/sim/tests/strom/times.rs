//! Closed forms: what passes idle units takes what their numbers say.

use starverbs_core::strom::Code;
use starverbs_kernels::Get;
use starverbs_kernels::get::{HashEntry, Params as Lookup};
use starverbs_sim::strom::{HUNDRED, Pair, Params, TEN, TEN_STORES};
use zerocopy::IntoBytes;

/// A packet's way from the sender's data path to the receiver's stack, ps: `frame` bytes behind the UDP
/// header, without ICRC.
fn way(params: &Params, frame: u64) -> u64 {
    let words = (frame + 46).div_ceil(params.width.into()).max(params.stage) * params.cycle;
    let stages = params.stages * params.stage * params.cycle;
    let wire = (frame + 70) * params.byte;
    2 * (words + stages) + wire + params.mac[0] + params.mac[1] + params.cable
}

#[test]
fn a_write_takes_its_units_times() {
    for params in [&TEN, &HUNDRED] {
        let mut pair = Pair::new(params);
        let pages = [0, 1].map(|at| pair.region(at, 64));
        pair.put(0, pages[0], &[7; 64]);
        pair.write(0, 0, pages[0], pages[1]);
        let known = pair.until(1, pages[1].last());
        /* command, payload; BTH, RETH and payload; memory */
        let bus = params.write + params.read + params.write;
        assert_eq!(known, bus + way(params, 12 + 16 + 64) + params.poll);
        assert_eq!(pair.bytes(1, pages[1]), [7; 64]);
    }
}

#[test]
fn a_read_takes_two_ways() {
    for params in [&TEN, &HUNDRED] {
        let mut pair = Pair::new(params);
        let pages = [0, 1].map(|at| pair.region(at, 64));
        pair.read(0, 0, pages[0], pages[1]);
        let known = pair.until(0, pages[0].last());
        /* BTH and RETH; BTH, AETH and payload */
        let ways = way(params, 12 + 16) + way(params, 12 + 4 + 64);
        let bus = params.write + params.read + params.write;
        assert_eq!(known, bus + ways + params.poll);
    }
}

/// What no kernel answers is answered without memory.
#[test]
fn an_rpc_that_no_kernel_takes_is_two_ways() {
    for params in [&TEN, &HUNDRED, &TEN_STORES] {
        let mut pair = Pair::new(params);
        let answer = pair.region(0, 64);
        let (known, code, data) = pair.ask(0, 1, &[0; 8], answer);
        assert_eq!((code, data.len()), (Code::NoKernel as u32, 0));
        /* 32 bytes of parameters, with the target, are one further store; the answer is a record */
        let ways = way(params, 12 + 16 + 32) + way(params, 12 + 16 + 16);
        let bus = params.further + params.write + params.write;
        assert_eq!(known, bus + ways + params.stage * params.cycle + params.poll);
    }
}

/// A chain of empty entries: each is a read that waits for the one before, and a step.
#[test]
fn a_kernel_waits_for_each_read() {
    for params in [&TEN, &HUNDRED] {
        let time = |entries: u32| {
            let mut pair = Pair::new(params);
            pair.load(1, Box::new(Get));
            let (table, answer) = (pair.region(1, entries * 64), pair.region(0, 64));
            for at in 1..entries {
                let entry = HashEntry { next: at.into(), ..HashEntry::default() };
                pair.put(1, table.part((at - 1) * 64, 64), entry.as_bytes());
            }
            let lookup = Lookup {
                table: table.addr.into(),
                key: 1.into(),
                table_key: table.key.into(),
                hops: entries.into(),
                ..Lookup::default()
            };
            let (known, code, _) = pair.ask(0, 1, lookup.as_bytes(), answer);
            assert_eq!(code, Code::NotFound as u32, "all were looked at");
            known
        };
        let bus = (64 + 24) * params.bus_byte / 1000;
        let hop = params.read + bus.max(params.dma_cycle * 64_u64.div_ceil(params.dma_width.into()));
        assert_eq!(time(5) - time(1), 4 * (hop + params.stage * params.cycle));
    }
}
