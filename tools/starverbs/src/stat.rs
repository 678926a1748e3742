//! `starverbs stat`: counters of the processes that use the card.
//!
//! Owns how they are printed, as text and as JSON. It must not know how they are found (`users`).

use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::Failure;
use crate::users::{self, User};

/// Show the counters of running programs.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only this process
    pid: Option<u32>,
    /// Print JSON, with all counters
    #[arg(long)]
    json: bool,
    /// Add a line for each queue pair
    #[arg(long)]
    qp: bool,
    /// Repeat after so many seconds, with the change per second
    #[arg(long, value_name = "SECS", value_parser = clap::value_parser!(u64).range(1..))]
    watch: Option<u64>,
}

/// Prints the counters.
pub(crate) fn stat(args: &Args) -> Result<(), Failure> {
    let mut before = users(args)?;
    print(args, &before, &[], 1);
    while let Some(seconds) = args.watch {
        std::thread::sleep(Duration::from_secs(seconds));
        let now = users(args)?;
        println!();
        print(args, &now, &before, seconds);
        before = now;
    }
    Ok(())
}

fn users(args: &Args) -> Result<Vec<User>, Failure> {
    let found = users::of(args.pid, |_| args.qp)?;
    if found.is_empty() {
        return Err(Failure::new(1, "no process that you may look into uses the card"));
    }
    Ok(found)
}

fn print(args: &Args, users: &[User], before: &[User], seconds: u64) {
    if args.json {
        println!("{:#}", Value::Array(users.iter().map(to_json).collect()));
        return;
    }
    for (i, user) in users.iter().enumerate() {
        if i > 0 {
            println!();
        }
        let old = before.iter().find(|old| old.pid == user.pid);
        print!("{}", to_text(user, old, seconds));
    }
}

fn to_json(user: &User) -> Value {
    let counters: Map<String, Value> =
        user.page.counters.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
    let mut object = json!({ "pid": user.pid, "command": user.command, "counters": counters });
    match &user.qps {
        Some(Ok(table)) => object["qps"] = table_to_json(table),
        Some(Err(reason)) => object["qps_error"] = json!(reason),
        None => {}
    }
    object
}

/// A table with a line of names, as one object a line.
fn table_to_json(table: &str) -> Value {
    let mut lines = table.lines().map(|line| line.split_ascii_whitespace());
    let names: Vec<&str> = lines.next().into_iter().flatten().collect();
    let value = |word: &str| word.parse::<u64>().map_or_else(|_| json!(word), |number| json!(number));
    let row = |words: std::str::SplitAsciiWhitespace<'_>| -> Value {
        names
            .iter()
            .zip(words)
            .map(|(name, word)| ((*name).to_owned(), value(word)))
            .collect::<Map<_, _>>()
            .into()
    };
    lines.map(row).collect()
}

/// What is shown of StaR beside what is not zero, as soon as there are queue pairs of its kind: that these
/// are zero is what one looks for.
const STAR: [&str; 5] = [
    "star_stateless_qps",
    "star_stateful_qps",
    "star_rejects",
    "star_host_bytes",
    "star_stateless_connection_bytes",
];

/// The counters that are not zero or are looked for nevertheless, with their change per second if `old` is
/// there.
fn to_text(user: &User, old: Option<&User>, seconds: u64) -> String {
    let mut text = format!("{} {}\n", user.pid, user.command);
    let counters = &user.page.counters;
    let has_star = counters.iter().any(|(name, value)| STAR[..2].contains(&name.as_str()) && *value != 0);
    let shown = |name: &str, value| value != 0 || has_star && STAR.contains(&name);
    for (name, value) in counters.iter().filter(|(name, value)| shown(name, *value)) {
        let previous = old.and_then(|old| old.page.counters.iter().find(|(n, _)| n == name));
        let rate =
            previous.map(|(_, previous)| value.wrapping_sub(*previous).cast_signed() / seconds.cast_signed());
        let rate = rate.map_or_else(String::new, |rate| format!("  {rate:+}/s"));
        text += &format!("  {name:<31} {value:>14}{rate}\n");
    }
    match &user.qps {
        Some(Ok(table)) => text += &aligned(table),
        Some(Err(reason)) => text += &format!("  queue pairs: {reason}\n"),
        None => {}
    }
    text
}

/// A table with its columns under each other.
pub(crate) fn aligned(table: &str) -> String {
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_ascii_whitespace().collect()).collect();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |i: usize| rows.iter().filter_map(|row| row.get(i)).map(|word| word.len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |row: &Vec<&str>| {
        row.iter().zip(&widths).map(|(word, width)| format!("  {word:>width$}")).collect::<String>() + "\n"
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use starverbs_verbs::stat::Snapshot;

    use super::*;

    fn user(pid: u32, sent: u64) -> User {
        let counters = vec![("tx_packets".to_owned(), sent), ("rx_packets".to_owned(), 0)];
        let page = Snapshot { pid, port: 4791, first_block: 1, counters };
        User { pid, command: "prog -x".to_owned(), page, qps: None }
    }

    #[test]
    fn text_leaves_out_zeros_and_shows_the_rate() {
        let text = to_text(&user(7, 300), Some(&user(7, 100)), 2);
        assert!(text.starts_with("7 prog -x\n") && text.contains("300  +100/s"), "{text}");
        assert!(!text.contains("rx_packets"), "{text}");
    }

    #[test]
    fn what_star_keeps_is_shown_even_if_it_is_nothing() {
        let with = |stateless: u64, stateful: u64| {
            let mut user = user(7, 300);
            let values = [stateless, stateful, 0, 0, 0];
            user.page
                .counters
                .extend(STAR.iter().zip(values).map(|(name, value)| ((*name).to_owned(), value)));
            to_text(&user, None, 1)
        };
        for text in [with(10_000, 0), with(0, 3)] {
            let zero = |name: &str| text.lines().any(|line| line.split_whitespace().eq([name, "0"]));
            assert!(zero("star_stateless_connection_bytes") && zero("star_rejects"), "{text}");
        }
        assert!(!with(0, 0).contains("star_"));
    }

    #[test]
    fn json_has_all_counters_and_queue_pairs() {
        let mut user = user(7, 300);
        user.qps = Some(Ok("qpn type sent\n65536 RC 12\n65537 UD 0\n".to_owned()));
        let value = to_json(&user);
        assert_eq!(value["counters"], json!({ "tx_packets": 300, "rx_packets": 0 }));
        assert_eq!(value["qps"][1], json!({ "qpn": 65537, "type": "UD", "sent": 0 }));
        assert!(to_text(&user, None, 1).contains("65536    RC    12"));
    }

    #[test]
    fn a_process_without_card_is_an_error_by_number() {
        let args = Args { pid: Some(1), json: false, qp: false, watch: None };
        assert_eq!(users(&args).err().map(|failure| failure.code), Some(1));
    }
}
