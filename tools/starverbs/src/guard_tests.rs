use std::io::Write;
use std::process::{Command, Stdio};

use clap::{Args as _, FromArgMatches};

use super::*;

fn parse(line: &[&str]) -> Result<Args, clap::Error> {
    let command = Args::augment_args(clap::Command::new("guard"));
    let matches = command.try_get_matches_from([&["guard"], line].concat())?;
    Args::from_arg_matches(&matches)
}

fn of(line: &[&str]) -> String {
    rules(&parse(line).expect("a good line"))
}

#[test]
fn nobody_may_send_who_is_not_named() {
    let text = of(&[]);
    assert!(text.contains("elements = { 4793 }") && !text.contains(" accept\n"), "{text}");
    assert!(text.contains("chain stateless {\n\t\tcounter drop\n"), "{text}");
    assert!(text.contains("hook output") && text.contains("hook forward"), "{text}");
}

#[test]
fn those_who_are_named_may() {
    let line =
        "--user 1000 --user hpc --group rdma --cgroup /system.slice/job.service/ --port 4793 --port 6000";
    let text = of(&line.split(' ').collect::<Vec<_>>());
    for rule in [
        "meta skuid 1000 accept",
        "meta skuid \"hpc\" accept",
        "meta skgid \"rdma\" accept",
        "socket cgroupv2 level 2 \"system.slice/job.service\" accept",
        "elements = { 4793, 6000 }",
    ] {
        assert!(text.contains(rule), "{rule}: {text}");
    }
    let (accepted, dropped) = (text.rfind(" accept").unwrap(), text.rfind("counter drop").unwrap());
    assert!(accepted < dropped, "{text}");
}

#[test]
fn what_is_no_name_gets_into_no_rule() {
    let bad = [
        ["--user", "a\" accept; #"],
        ["--user", ""],
        ["--user", "4294967296"],
        ["--group", "-x y"],
        ["--cgroup", "a\"b"],
        ["--cgroup", "a/../b"],
        ["--cgroup", "/"],
        ["--port", "0"],
        ["--port", "65536"],
    ];
    for [option, value] in bad {
        assert!(parse(&[&format!("{option}={value}")]).is_err(), "{option} {value:?}");
    }
}

/// What `script` says when these rules are loaded in a network namespace of its own, where it is root.
/// `None`: the host has no nft(8), or lets nobody make such a namespace.
fn in_namespace(rules: &str, script: &str) -> Option<String> {
    let whole = format!("ip link set lo up && nft -f /dev/stdin || {{ echo none; exit; }}\n{script}");
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--net", "bash", "-c", &whole]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().ok()?;
    /* without nft nobody reads it */
    _ = child.stdin.take()?.write_all(rules.as_bytes());
    let out = child.wait_with_output().ok()?;
    let said = String::from_utf8_lossy(&out.stdout).trim().to_owned();
    (out.status.success() && said != "none").then_some(said)
}

/// The kernel takes the rules, and holds programs to them; a second set takes the place of the first.
#[test]
fn the_kernel_holds_programs_to_it() {
    if in_namespace("table inet probe\n", "echo works").as_deref() != Some("works") {
        eprintln!("not tested: no nft, or no network namespaces");
        return;
    }
    let send = "for at in 127.0.0.1/4793 ::1/4793 127.0.0.1/4792; do
        (echo x >/dev/udp/$at) 2>/dev/null && echo passes || echo fails; done";
    let lines = |rules: &str| in_namespace(rules, send).expect("it works").replace('\n', " ");
    assert_eq!(lines(&of(&[])), "fails fails passes");
    assert_eq!(lines(&of(&["--user", "0"])), "passes passes passes");
    assert_eq!(lines(&of(&["--group", "0"])), "passes passes passes");
    assert_eq!(lines(&of(&["--user", "1"])), "fails fails passes");
    assert_eq!(lines(&of(&["--port", "4792"])), "passes passes fails");
    assert_eq!(lines(&(of(&["--user", "0"]) + &of(&[]))), "fails fails passes");
}
