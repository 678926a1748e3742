//! `include/starverbs/regs.h` and `uapi.h` match the types of `board`, `chardev.h` those of `chardev`: a C
//! compiler compares them.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

use starverbs_queues::board::{COMMAND_BYTES, CONSTANTS, STRUCTS};
use starverbs_queues::chardev;

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

/// A program that is compiled if C has these numbers.
fn program(constants: &[(&str, u64)]) -> String {
    let mut text = "#include <stddef.h>\n".to_owned();
    for header in ["regs", "uapi", "chardev", "queues"] {
        writeln!(text, "#include <starverbs/{header}.h>").unwrap();
    }
    let mut same = |c: String, number: u64| {
        writeln!(text, "_Static_assert((unsigned long long)({c}) == {number}ULL, \"{c}\");").unwrap();
    };
    constants.iter().for_each(|(name, value)| same((*name).to_owned(), *value));
    same("STARVERBS_COMMAND_BYTES".to_owned(), COMMAND_BYTES as u64);
    for (name, size, fields) in STRUCTS.iter().chain(chardev::STRUCTS) {
        same(format!("sizeof(struct {name})"), *size as u64);
        for (field, offset) in *fields {
            same(format!("offsetof(struct {name}, {field})"), *offset as u64);
        }
    }
    text
}

#[test]
#[cfg_attr(miri, ignore = "runs the C compiler")]
fn c_has_the_same_numbers() {
    let (taken, why) = compiles(&program(&[CONSTANTS, chardev::CONSTANTS].concat()));
    assert!(taken, "{why}");
    let (name, value) = CONSTANTS[0];
    assert!(!compiles(&program(&[(name, value + 1)])).0, "the comparison sees a difference");
}

/// A name that C has and Rust has not would be compared with nothing.
#[test]
#[cfg_attr(miri, ignore = "runs the C compiler")]
fn c_has_no_more_names() {
    let headers = concat!(
        include_str!("../../../include/starverbs/regs.h"),
        include_str!("../../../include/starverbs/uapi.h"),
        include_str!("../../../include/starverbs/chardev.h")
    );
    let defined = headers.lines().filter_map(|line| line.strip_prefix("#define ")?.split_once(' '));
    let constants = CONSTANTS.iter().chain(chardev::CONSTANTS);
    let known =
        |name: &str| constants.clone().any(|(known, _)| *known == name) || name == "STARVERBS_COMMAND_BYTES";
    assert_eq!(defined.filter(|(name, _)| !known(name)).collect::<Vec<_>>(), []);
    assert_eq!(headers.matches("\nstruct ").count(), STRUCTS.len() + chardev::STRUCTS.len());
}

#[test]
#[cfg_attr(miri, ignore = "runs the C compiler")]
fn no_two_registers_are_the_same() {
    let of = |prefix: &str| {
        let mut all: Vec<u64> =
            CONSTANTS.iter().filter(|(name, _)| name.starts_with(prefix)).map(|(_, value)| *value).collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        (count, all.len())
    };
    for prefix in [
        "STARVERBS_REG_",
        "STARVERBS_CAP_",
        "STARVERBS_OP_",
        "STARVERBS_COUNTER_",
        "STARVERBS_CTRL_",
        "STARVERBS_QPC_POLICY_",
        "STARVERBS_QPC_IN_",
    ] {
        let (count, different) = of(prefix);
        assert!(count > 1 && count == different, "{prefix}");
    }
}
