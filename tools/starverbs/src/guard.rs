//! `starverbs guard`: prints rules for nftables that keep a host's programs from sending to stateless cards.
//!
//! A stateless card of StaR does what a packet says, so who sends there has to be trusted: the paper wants a
//! module in the kernel of hosts with other programs (III-E3). Owns the rules' text. It changes nothing on
//! the host: that is nft(8)'s.

use std::io::Write;

use starverbs_star::wire::PORT_STATELESS;

use crate::Failure;

/// Print nftables rules that keep other programs of this host from sending to stateless cards.
#[derive(clap::Args, Default)]
pub(crate) struct Args {
    /// A user, by name or number, whose programs may send there; may be given more than once
    #[arg(long, value_name = "USER", value_parser = account)]
    user: Vec<String>,
    /// A group, by name or number, whose programs may send there; may be given more than once
    #[arg(long, value_name = "GROUP", value_parser = account)]
    group: Vec<String>,
    /// A control group (version 2), as a path below its root, whose programs may send there; may be given
    /// more than once
    #[arg(long, value_name = "PATH", value_parser = control_group)]
    cgroup: Vec<String>,
    /// A UDP port of stateless cards; may be given more than once [default: 4793]
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    port: Vec<u16>,
}

/// Prints them.
pub(crate) fn guard(args: &Args) -> Result<(), Failure> {
    std::io::stdout().write_all(rules(args).as_bytes()).map_err(|e| Failure::new(1, e))
}

/// The rules, which take the place of those of an earlier call. What leaves through raw sockets passes them,
/// too; what the host forwards for guests and containers is nobody's here.
fn rules(args: &Args) -> String {
    let ports = if args.port.is_empty() { vec![PORT_STATELESS] } else { args.port.clone() };
    let ports = ports.iter().map(u16::to_string).collect::<Vec<_>>().join(", ");
    let named = |what: &'static str, who: &[String]| {
        who.iter().map(move |who| format!("\t\tmeta {what} {} accept\n", quoted(who))).collect::<String>()
    };
    let cgroups = args.cgroup.iter().map(|path| {
        let level = path.split('/').count();
        format!("\t\tsocket cgroupv2 level {level} \"{path}\" accept\n")
    });
    let accepted = named("skuid", &args.user) + &named("skgid", &args.group) + &cgroups.collect::<String>();
    format!(
        "# Printed by `starverbs guard`, to be loaded by `nft -f`: who may send to stateless cards of StaR.
table inet starverbs_guard
delete table inet starverbs_guard
table inet starverbs_guard {{
\tset ports {{
\t\ttype inet_service
\t\telements = {{ {ports} }}
\t}}
\tchain output {{
\t\ttype filter hook output priority filter; policy accept;
\t\tudp dport @ports jump stateless
\t}}
\tchain forward {{
\t\ttype filter hook forward priority filter; policy accept;
\t\tudp dport @ports counter drop
\t}}
\tchain stateless {{
{accepted}\t\tcounter drop
\t}}
}}
"
    )
}

/// A number as it is, a name as a string.
fn quoted(who: &str) -> String {
    if who.parse::<u32>().is_ok() { who.to_owned() } else { format!("\"{who}\"") }
}

/// The name or number of a user or group: nothing that the rules would read as something else.
fn account(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
    let number = text.starts_with(|c: char| c.is_ascii_digit());
    match text {
        _ if number && text.parse::<u32>().is_err() => Err("no number of an account".into()),
        "" => Err("a name or a number".into()),
        _ if text.len() <= 32 && !text.starts_with('-') && text.chars().all(plain) => Ok(text.into()),
        _ => Err("a name of letters, digits, '_', '.' and '-', or a number".into()),
    }
}

/// The path of a control group below its root.
fn control_group(text: &str) -> Result<String, String> {
    let path = text.trim_matches('/');
    let plain = |c: char| c.is_ascii_graphic() && c != '"' && c != '\\';
    let good = |part: &str| !part.is_empty() && part != "." && part != ".." && part.chars().all(plain);
    if path.split('/').all(good) { Ok(path.into()) } else { Err("a path like system.slice/x.service".into()) }
}

#[cfg(test)]
#[path = "guard_tests.rs"]
mod tests;
