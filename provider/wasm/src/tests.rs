//! Modules that keep the rules, and modules that break them: nothing but the kernel itself suffers.

#[path = "../../kernels/src/host.rs"]
mod host;

use starverbs_core::rng::Rng;
use starverbs_core::strom::Code;
use starverbs_kernels::ModuleKernel;

use self::host::TestHost;
use crate::{LoadError, MEMORY_BYTES, MODULE_BYTES, WasmModule};

const BASE: u64 = 0x4000;

/// A module whose mailbox lies at 0x1000. `begin` stands beside the functions.
fn text(begin: &str, start: &str, step: &str) -> Vec<u8> {
    let module = format!(
        r#"(module
            (memory (export "memory") 1)
            {begin}
            (func (export "starverbs_mailbox_v1") (result i32) (i32.const 0x1000))
            (func (export "starverbs_start") (result i32) {start})
            (func (export "starverbs_step") (result i32) {step}))"#
    );
    wat::parse_str(module).expect("a module")
}

/// Stores a word of the mailbox.
fn set(offset: u32, value: &str) -> String {
    format!("(i32.store (i32.const {}) {value})", 0x1000 + offset)
}

const COMMANDS: u32 = 80;
const REPLY: u32 = 84;
const QUEUE: u32 = 112;
const GO_ON: &str = "(i32.const -1)";

/// Answers with the parameters.
fn echo() -> Vec<u8> {
    let answer = format!(
        "{} {} {} (i32.const 0)",
        set(REPLY, "(i32.const 1)"),
        set(88, "(i32.const 0x1670)"),
        set(92, "(i32.load (i32.const 0x1048))")
    );
    text("", GO_ON, &answer)
}

fn load(module: &[u8]) -> Result<ModuleKernel<WasmModule>, LoadError> {
    let (module, mailbox) = WasmModule::load(module)?;
    Ok(ModuleKernel::new(module, mailbox).expect("a mailbox in its memory"))
}

fn call(kernel: &mut ModuleKernel<WasmModule>, params: &[u8]) -> (Code, Vec<u8>) {
    TestHost::new(BASE, 4096).call(kernel, params)
}

#[test]
fn a_module_answers_with_its_parameters() {
    let mut kernel = load(&echo()).unwrap();
    assert_eq!(call(&mut kernel, b"what was sent"), (Code::Ok, b"what was sent".to_vec()));
    assert_eq!(call(&mut kernel, &[7; 4096]), (Code::Ok, vec![7; 4096]));
    assert!(!kernel.is_broken());
}

/// Reads a word of the host, keeps its number of steps in a register, and writes the word elsewhere.
#[test]
fn commands_reach_the_host_and_registers_last() {
    let queue = |kind: u32, key: u32, va: u64, at: u32| {
        format!(
            "{} {} (i64.store (i32.const {}) (i64.const {va})) {} {} {}",
            set(QUEUE, &format!("(i32.const {kind})")),
            set(QUEUE + 4, &format!("(i32.const {key})")),
            0x1000 + QUEUE + 8,
            set(QUEUE + 16, "(i32.const 8)"),
            set(QUEUE + 20, &format!("(i32.const {at})")),
            set(COMMANDS, "(i32.const 1)"),
        )
    };
    let start = format!("{} {GO_ON}", queue(1, TestHost::KEY, BASE + 16, 0));
    let second = queue(2, TestHost::KEY, BASE + 64, 0x1000 + 1648 + 4096);
    let step = format!(
        "{} (i32.load (i32.const 0x1000)) (if (result i32) (then (i32.const 0)) (else {second} {} {GO_ON}))",
        "", /* the first register says whether this is the second step */
        set(0, "(i32.const 1)")
    );
    let mut kernel = load(&text("", &start, &step)).unwrap();
    let mut host = TestHost::new(BASE, 4096);
    for word in [*b"abcdefgh", *b"ijklmnop"] {
        host.put(BASE + 16, &word);
        assert_eq!(host.call(&mut kernel, b"").0, Code::Ok);
        assert_eq!(host.get(BASE + 64, 8), word);
    }
    let denied = text("", &format!("{} {GO_ON}", queue(1, 1, BASE, 0)), "(i32.const 0)");
    assert_eq!(call(&mut load(&denied).unwrap(), b"").0, Code::Access);
}

#[test]
fn a_module_that_breaks_a_rule_answers_fault_from_then_on() {
    let endless = "(loop $again (br $again)) (i32.const 0)";
    let deep = "(func $deep (result i32) (i32.add (call $deep) (i32.const 1)))";
    let beyond = format!(
        "{} {} {}",
        set(REPLY, "(i32.const 1)"),
        set(88, "(i32.const 0xfffff)"),
        set(92, "(i32.const 8)")
    );
    let wild = format!(
        "{} {} {} {}",
        set(COMMANDS, "(i32.const 1)"),
        set(QUEUE, "(i32.const 2)"),
        set(QUEUE + 16, "(i32.const 8)"),
        set(QUEUE + 20, "(i32.const 0xfffc)")
    );
    let broken = [
        text("", endless, "(i32.const 0)"),
        text("", GO_ON, endless),
        text("", GO_ON, "(unreachable)"),
        text(deep, GO_ON, "(call $deep)"),
        text("", GO_ON, "(i32.load (i32.const 0x10000))"),
        text("", GO_ON, "(i32.store (i32.const -4) (i32.const 0)) (i32.const 0)"),
        text("", GO_ON, "(i32.div_u (i32.const 1) (i32.const 0))"),
        text("", GO_ON, "(i32.const 8)"),
        text("", GO_ON, "(i32.const -2)"),
        text("", GO_ON, &format!("{} (i32.const 0)", set(COMMANDS, "(i32.const 65)"))),
        text("", GO_ON, &format!("{} (i32.const 0)", set(COMMANDS, "(i32.const 1)"))),
        text("", GO_ON, &format!("{} (i32.const 0)", set(REPLY, "(i32.const 3)"))),
        text("", GO_ON, &format!("{beyond} (i32.const 0)")),
        text("", GO_ON, &format!("{wild} (i32.const 0)")),
    ];
    for (at, module) in broken.iter().enumerate() {
        let mut kernel = load(module).unwrap();
        for _ in 0..2 {
            assert_eq!(call(&mut kernel, b"params"), (Code::Fault, vec![]), "module {at}");
        }
        assert!(kernel.is_broken(), "module {at}");
    }
}

/// A stream: bytes are counted from its first packet to its last, when the host gets their number.
#[test]
fn registers_last_from_packet_to_packet() {
    let number = format!(
        "{} {} (i64.store (i32.const {}) (i64.const {BASE})) {} {} {}",
        set(QUEUE, "(i32.const 2)"),
        set(QUEUE + 4, &format!("(i32.const {})", TestHost::KEY)),
        0x1000 + QUEUE + 8,
        set(QUEUE + 16, "(i32.const 4)"),
        set(QUEUE + 20, "(i32.const 0x1000)"),
        set(COMMANDS, "(i32.const 1)")
    );
    let start = format!(
        "{} (if (i32.and (i32.load (i32.const 0x1044)) (i32.const 4)) (then {number})) {GO_ON}",
        set(0, "(i32.add (i32.load (i32.const 0x1000)) (i32.load (i32.const 0x1048)))")
    );
    let mut kernel = load(&text("", &start, "(i32.const 0)")).unwrap();
    let mut host = TestHost::new(BASE, 4096);
    for _ in 0..2 {
        assert_eq!(host.feed(&mut kernel, &[1; 4096], true, false), Code::Ok);
        assert_eq!(host.feed(&mut kernel, &[1; 4096], false, false), Code::Ok);
        assert_eq!(host.get(BASE, 4), [0; 4]);
        assert_eq!(host.feed(&mut kernel, &[1; 100], false, true), Code::Ok);
        assert_eq!(host.get(BASE, 4), 8292u32.to_le_bytes());
        host.put(BASE, &[0; 4]);
    }
}

/// One that asks for ever more memory is refused it, and goes on.
#[test]
fn memory_is_bounded() {
    let grow = "(local $all i32)
        (loop $more (br_if $more (i32.ne (memory.grow (i32.const 16)) (i32.const -1))))
        (local.set $all (memory.size)) ";
    let answer = format!(
        "{grow} (i32.store (i32.const 0) (local.get $all)) {} {} (i32.const 0)",
        set(REPLY, "(i32.const 1)"),
        set(92, "(i32.const 4)")
    );
    let (code, pages) = call(&mut load(&text("", GO_ON, &answer)).unwrap(), b"");
    let most = (MEMORY_BYTES >> 16) as u32;
    assert_eq!(code, Code::Ok);
    let pages = u32::from_le_bytes(pages.try_into().unwrap());
    assert!((most - 16..=most).contains(&pages), "{pages} pages");
}

#[test]
fn what_is_no_kernel_is_refused_with_a_reason() {
    let whole = |text: &str| wat::parse_str(text).expect("a module");
    let imports = whole(r#"(module (import "env" "now" (func)) (memory (export "memory") 1))"#);
    assert!(matches!(WasmModule::load(&imports), Err(LoadError::Imports(name)) if name == "env.now"));
    for empty in [r#"(module)"#, r#"(module (memory (export "memory") 1))"#] {
        assert!(matches!(WasmModule::load(&whole(empty)), Err(LoadError::Missing(_))));
    }
    let typed = r#"(module (memory (export "memory") 1) (func (export "starverbs_mailbox_v1")))"#;
    assert!(matches!(WasmModule::load(&whole(typed)), Err(LoadError::Missing("starverbs_mailbox_v1"))));
    let large = format!(r#"(module (memory (export "memory") {}))"#, (MEMORY_BYTES >> 16) + 1);
    assert!(matches!(WasmModule::load(&whole(&large)), Err(LoadError::NoMemory(_))));
    let table = r#"(module (memory (export "memory") 1) (table 100000000 funcref))"#;
    assert!(matches!(WasmModule::load(&whole(table)), Err(LoadError::NoMemory(_))));
    let endless = "(func $forever (loop $again (br $again))) (start $forever)";
    assert!(matches!(WasmModule::load(&text(endless, GO_ON, GO_ON)), Err(LoadError::Broke(_))));
    for malformed in [&b""[..], b"\0asm", b"\x7fELF\x02\x01\x01", b"(module)"] {
        assert!(matches!(WasmModule::load(malformed), Err(LoadError::Malformed(_))));
    }
    let long = vec![0; MODULE_BYTES + 1];
    assert!(matches!(WasmModule::load(&long), Err(LoadError::TooLong(_))));
    let nowhere = r#"(module (memory (export "memory") 1)
        (func (export "starverbs_mailbox_v1") (result i32) (i32.const 0xfff0))
        (func (export "starverbs_start") (result i32) (i32.const 0))
        (func (export "starverbs_step") (result i32) (i32.const 0)))"#;
    let (module, mailbox) = WasmModule::load(&whole(nowhere)).unwrap();
    assert!(ModuleKernel::new(module, mailbox).is_none());
}

/// Signals of this process that have a handler.
fn handled() -> String {
    let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
    status.lines().find(|line| line.starts_with("SigCgt")).expect("a line").to_owned()
}

#[test]
fn no_signal_gets_a_handler() {
    let before = handled();
    assert_eq!(call(&mut load(&echo()).unwrap(), b"x").0, Code::Ok);
    assert_eq!(call(&mut load(&text("", GO_ON, "(unreachable)")).unwrap(), b"x").0, Code::Fault);
    assert_eq!(handled(), before);
}

/// Modules with bytes changed, at random: most are refused, the others run or break.
#[test]
fn no_module_harms_who_runs_it() {
    let whole = echo();
    let mut rng = Rng::new([3, 9]);
    let (mut refused, mut ran) = (0, 0);
    for _ in 0..600 {
        let mut module = whole.clone();
        for _ in 0..=rng.word() % 3 {
            /* in half of them where the code is, so that more of them are modules still */
            let from = if rng.word() & 1 == 0 { 0 } else { module.len() as u64 - 60 };
            let at = (from + rng.word() % (module.len() as u64 - from)) as usize;
            module[at] = rng.word() as u8;
        }
        let kernel = WasmModule::load(&module);
        let Ok((module, mailbox)) = kernel else {
            refused += 1;
            continue;
        };
        let Some(mut kernel) = ModuleKernel::new(module, mailbox) else { continue };
        let mut host = TestHost::new(BASE, 4096);
        host.put(BASE, &[5; 4096]);
        host.call(&mut kernel, b"parameters");
        assert_eq!(host.get(BASE, 4096), [5; 4096], "it has no key");
        ran += 1;
    }
    assert!(refused > 200 && ran > 15, "{refused} refused, {ran} ran");
}
