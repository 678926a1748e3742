//! `include/starverbs/kernel.h` matches the mailbox: a C compiler compares them.

use core::mem::offset_of;
use std::io::Write as _;
use std::process::{Command, Stdio};

use starverbs_core::strom::Code;
use starverbs_kernels::mailbox::{
    COMMANDS, MAILBOX, Mailbox, MailboxCommand, PENDING, PIECE, START, STEP, command, input, reply,
};

/// Whether a C compiler takes a program, and what it says.
fn compiles(program: &str) -> (bool, String) {
    let include = concat!(env!("CARGO_MANIFEST_DIR"), "/../../include");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut cc = Command::new(compiler)
        .args(["-std=c11", "-Wall", "-Werror", "-fsyntax-only", "-I", include, "-xc", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a C compiler");
    cc.stdin.take().unwrap().write_all(program.as_bytes()).unwrap();
    let done = cc.wait_with_output().unwrap();
    (done.status.success(), String::from_utf8_lossy(&done.stderr).into_owned())
}

fn program(numbers: &[(String, i64)]) -> String {
    let same = numbers.iter().map(|(c, n)| format!("_Static_assert((long long)({c}) == {n}, \"{c}\");\n"));
    format!("#include <stddef.h>\n#include <starverbs/kernel.h>\n{}", same.collect::<String>())
}

macro_rules! fields {
    ($c:literal, $rust:ty: $($field:ident)*) => {{
        let mut all = vec![(format!("sizeof(struct {})", $c), size_of::<$rust>() as i64)];
        $(all.push((
            format!("offsetof(struct {}, {})", $c, stringify!($field)),
            offset_of!($rust, $field) as i64,
        ));)*
        all
    }};
}

#[test]
fn c_has_the_same_numbers() {
    let mut numbers = fields!("starverbs_command", MailboxCommand: kind key va len at);
    numbers.extend(fields!("starverbs_mailbox", Mailbox: regs qpn input bytes_len read_len commands reply
        reply_at reply_len reply_key reserved reply_va queue bytes read));
    let constants = [
        ("GO_ON", i64::from(PENDING)),
        ("OK", Code::Ok as i64),
        ("BAD_PARAM", Code::BadParam as i64),
        ("NOT_FOUND", Code::NotFound as i64),
        ("RETRIES", Code::Retries as i64),
        ("ACCESS", Code::Access as i64),
        ("OVERFLOW", Code::Overflow as i64),
        ("PARAMS", input::PARAMS.into()),
        ("DATA", input::DATA.into()),
        ("FIRST", input::FIRST.into()),
        ("LAST", input::LAST.into()),
        ("COMMANDS", COMMANDS as i64),
        ("PIECE", PIECE as i64),
        ("COMMAND_READ", command::READ.into()),
        ("COMMAND_WRITE", command::WRITE.into()),
        ("COMMAND_SEND", command::SEND.into()),
        ("REPLY_BYTES", reply::BYTES.into()),
        ("REPLY_REGION", reply::REGION.into()),
    ];
    numbers.extend(constants.map(|(name, n)| (format!("STARVERBS_{name}"), n)));
    let (taken, why) = compiles(&program(&numbers));
    assert!(taken, "{why}");
    let (name, value) = numbers[0].clone();
    assert!(!compiles(&program(&[(name, value + 1)])).0, "the comparison sees a difference");
}

#[test]
fn c_exports_the_same_names() {
    let header = include_str!("../../../include/starverbs/kernel.h");
    assert!(header.contains(&format!("export_name(\"{MAILBOX}\")")));
    for (name, method) in [(START, "start"), (STEP, "step")] {
        assert_eq!(name, format!("starverbs_{method}"), "as STARVERBS_KERNEL makes it");
    }
    assert!(header.contains("export_name(\"starverbs_\" #method)"));
}
