//! What a kernel costs as a module: the card's own, compiled to WebAssembly, beside the same code in here, on
//! memory that is only an array. Both must give the same answers.
//!
//! usage: cost FOLDER [ROUNDS]: the folder has get.wasm, traverse.wasm, consistent.wasm, hll.wasm
//! (`make modules`). Writes a line for each, by tabs: kernel, ns a request native, as a module.

#[path = "../../kernels/src/host.rs"]
#[allow(dead_code)]
mod host;

use std::path::Path;
use std::time::Instant;

use host::TestHost;
use starverbs_core::strom::{Code, Kernel};
use starverbs_kernels::{Builtin, ModuleKernel, consistent, crc64, get, hll, traverse};
use starverbs_wasm::WasmModule;
use zerocopy::IntoBytes;

const BASE: u64 = 0x10_0000;
/// Requests between two looks at the clock.
const REQUESTS: u32 = 20_000;

/// A request of a kernel, over and over.
struct Case {
    name: &'static str,
    builtin: Builtin,
    /// Bytes of an RPC, or of packets of a stream
    input: Vec<u8>,
    stream: bool,
}

fn cases(host: &mut TestHost) -> Vec<Case> {
    /* GET: the second entry of a chain has the key */
    let mut entry = get::HashEntry { next: 1.into(), ..Default::default() };
    host.put(BASE, entry.as_bytes());
    entry.buckets[2] = get::Bucket { key: 7.into(), value: (BASE + 1024).into(), len: 64.into() };
    host.put(BASE + 64, entry.as_bytes());
    let key = TestHost::KEY;
    let params = get::Params {
        table: BASE.into(),
        key: 7.into(),
        index: 0.into(),
        table_key: key.into(),
        value_key: key.into(),
        hops: 4.into(),
    };
    /* a list of eight elements: key, value's address, next element's address */
    for n in 0..8 {
        let at = BASE + 2048 + n * 64;
        let next = if n < 7 { at + 64 } else { 0 };
        host.put(at, [n, BASE + 1024, next].as_bytes());
    }
    let list = traverse::Params {
        element: (BASE + 2048).into(),
        key: 7.into(),
        rkey: key.into(),
        len: 64.into(),
        mask: 1.into(),
        predicate: traverse::EQUAL,
        value: 2,
        next: 4,
        flags: traverse::NEXT,
        hops: 255,
        ..Default::default()
    };
    /* an object with its CRC */
    let object: Vec<u8> = (0..4088u32).map(|n| n as u8).collect();
    host.put(BASE + 8192, &object);
    host.put(BASE + 8192 + 4088, &crc64::crc64(0, &object).to_le_bytes());
    let checked = consistent::Params {
        object: (BASE + 8192).into(),
        rkey: key.into(),
        len: 4096.into(),
        tries: 1.into(),
        ..Default::default()
    };
    let items: Vec<u8> = (0..1024u32).flat_map(|n| n.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
    let rpc = |name, builtin, params: &[u8]| Case { name, builtin, input: params.to_vec(), stream: false };
    vec![
        rpc("get", Builtin::Get, params.as_bytes()),
        rpc("traverse", Builtin::Traverse, list.as_bytes()),
        rpc("consistent", Builtin::Consistent, checked.as_bytes()),
        Case { name: "hll", builtin: Builtin::Hll, input: items, stream: true },
    ]
}

/// One request, and its answer.
fn ask(host: &mut TestHost, kernel: &mut dyn Kernel, case: &Case) -> (Code, Vec<u8>) {
    match case.stream {
        false => host.call(kernel, &case.input),
        true => (host.feed(kernel, &case.input, true, true), vec![]),
    }
}

/// Nanoseconds a request.
fn time(host: &mut TestHost, kernel: &mut dyn Kernel, case: &Case) -> f64 {
    let count = if case.input.len() > 64 { REQUESTS / 20 } else { REQUESTS };
    let begun = Instant::now();
    for _ in 0..count {
        let (code, _) = ask(host, kernel, case);
        assert_eq!(code, Code::Ok, "{}", case.name);
    }
    begun.elapsed().as_nanos() as f64 / f64::from(count)
}

fn median(mut rounds: Vec<f64>) -> f64 {
    rounds.sort_by(f64::total_cmp);
    rounds[rounds.len() / 2]
}

fn main() {
    let mut args = std::env::args().skip(1);
    let folder = args.next().expect("usage: cost FOLDER [ROUNDS]");
    let rounds: usize = args.next().map_or(5, |rounds| rounds.parse().expect("a number of rounds"));
    let mut host = TestHost::new(BASE, 1 << 16);
    for case in cases(&mut host) {
        let file = Path::new(&folder).join(case.name).with_extension("wasm");
        let bytes = std::fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let (module, mailbox) = WasmModule::load(&bytes).expect("a kernel");
        let mut module = ModuleKernel::new(module, mailbox).expect("a mailbox in its memory");
        let mut native = case.builtin.make();
        assert_eq!(ask(&mut host, &mut module, &case), ask(&mut host, &mut *native, &case), "{}", case.name);
        if case.stream {
            let estimate = hll::Params::default();
            let estimate = estimate.as_bytes();
            assert_eq!(host.call(&mut module, estimate), host.call(&mut *native, estimate), "{}", case.name);
        }
        let (mut by_module, mut by_native) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            by_native.push(time(&mut host, &mut *native, &case));
            by_module.push(time(&mut host, &mut module, &case));
        }
        println!("{}\t{:.0}\t{:.0}", case.name, median(by_native), median(by_module));
    }
}
