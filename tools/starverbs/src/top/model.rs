//! What `starverbs top` shows: two looks at the programs, the rates between them, what is chosen.
//!
//! No terminal, no clock: time passes by `take`. Rates are changes per second.

use std::collections::VecDeque;
use std::time::Duration;

use crate::users::User;

/// How many rates of the chosen process are kept for the curve.
const KEPT: usize = 240;
/// PSNs are numbers of 24 bits.
const PSN_MASK: u32 = (1 << 24) - 1;
/// The longest pause between two looks, in seconds.
const LONGEST: u64 = 60;

/// What the lower half shows of the chosen process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Details {
    Counters,
    QueuePairs,
}

/// Which half the arrows move in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Focus {
    Processes,
    Details,
}

/// The programs, as they were seen twice.
#[derive(Debug)]
pub(super) struct Model {
    users: Vec<User>,
    before: Vec<User>,
    /// Seconds between the two looks; 0 before the second.
    elapsed: f64,
    chosen: Option<u32>,
    focus: Focus,
    details: Details,
    /// The line of the details that is chosen.
    line: usize,
    /// Packets a second of the chosen process, the newest last.
    curve: VecDeque<u64>,
    every: u64,
    paused: bool,
}

/// A line of the list of queue pairs: its words, and packets a second sent and received in order.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct QpLine {
    pub(super) words: Vec<String>,
    pub(super) sent: Option<f64>,
    pub(super) received: Option<f64>,
}

impl Model {
    /// Nothing seen yet; `every` is the pause between looks in seconds.
    pub(super) fn new(every: u64) -> Model {
        Model {
            users: Vec::new(),
            before: Vec::new(),
            elapsed: 0.0,
            chosen: None,
            focus: Focus::Processes,
            details: Details::Counters,
            line: 0,
            curve: VecDeque::new(),
            every,
            paused: false,
        }
    }

    /// Takes another look's result, `elapsed` after the one before.
    pub(super) fn take(&mut self, users: Vec<User>, elapsed: Duration) {
        self.before = std::mem::replace(&mut self.users, users);
        self.elapsed = elapsed.as_secs_f64();
        if self.chosen.is_none_or(|pid| self.position(pid).is_none()) {
            self.choose(0);
        }
        let packets = self.user().and_then(|user| {
            let rate = self.rate(user, "tx_packets")? + self.rate(user, "rx_packets")?;
            Some(rate.max(0.0) as u64)
        });
        self.curve.extend(packets);
        while self.curve.len() > KEPT {
            self.curve.pop_front();
        }
        self.line = self.line.min(self.lines().saturating_sub(1));
    }

    pub(super) fn users(&self) -> &[User] {
        &self.users
    }

    /// The chosen process's number.
    pub(super) fn chosen(&self) -> Option<u32> {
        self.chosen
    }

    /// The chosen process.
    pub(super) fn user(&self) -> Option<&User> {
        self.users.get(self.position(self.chosen?)?)
    }

    /// The chosen process's place in the list.
    pub(super) fn position(&self, pid: u32) -> Option<usize> {
        self.users.iter().position(|user| user.pid == pid)
    }

    fn choose(&mut self, at: usize) {
        let pid = self.users.get(at).map(|user| user.pid);
        if pid != self.chosen {
            (self.chosen, self.line) = (pid, 0);
            self.curve.clear();
        }
    }

    /// The change per second of a counter, or of all whose names begin with `name` if it ends with `*`. None
    /// until the process was seen twice.
    pub(super) fn rate(&self, user: &User, name: &str) -> Option<f64> {
        let old = self.before.iter().find(|old| old.pid == user.pid)?;
        if self.elapsed <= 0.0 {
            return None;
        }
        let of = |user: &User| match name.strip_suffix('*') {
            Some(prefix) => {
                let group = user.page.counters.iter().filter(|(name, _)| name.starts_with(prefix));
                group.fold(0_u64, |sum, (_, value)| sum.wrapping_add(*value))
            }
            None => user.counter(name).unwrap_or(0),
        };
        Some(of(user).wrapping_sub(of(old)).cast_signed() as f64 / self.elapsed)
    }

    /// The counters of the chosen process that are not zero, with their rates.
    pub(super) fn counters(&self) -> Vec<(&str, u64, Option<f64>)> {
        let Some(user) = self.user() else { return Vec::new() };
        let shown = user.page.counters.iter().filter(|(_, value)| *value != 0);
        shown.map(|(name, value)| (name.as_str(), *value, self.rate(user, name))).collect()
    }

    /// The queue pairs of the chosen process: names of the columns, then a line each.
    ///
    /// # Errors
    /// Why the process did not tell them.
    pub(super) fn queue_pairs(&self) -> Result<(Vec<&str>, Vec<QpLine>), &str> {
        let table = match self.user().and_then(|user| user.qps.as_ref()) {
            Some(Ok(table)) => table,
            Some(Err(reason)) => return Err(reason),
            None => return Ok((Vec::new(), Vec::new())),
        };
        let old = self.before.iter().find(|old| Some(old.pid) == self.chosen);
        let old = old.and_then(|old| old.qps.as_ref()?.as_ref().ok()).map_or("", String::as_str);
        let mut lines = table.lines();
        let names: Vec<&str> = lines.next().unwrap_or("").split_ascii_whitespace().collect();
        let line = |line: &str| {
            let words: Vec<String> = line.split_ascii_whitespace().map(str::to_owned).collect();
            let before =
                old.lines().find(|old| old.split_ascii_whitespace().next() == words.first().map(|w| &**w));
            let before: Vec<&str> = before.unwrap_or("").split_ascii_whitespace().collect();
            let rate = |name: &str| {
                let at = names.iter().position(|n| *n == name)?;
                let (now, then): (u32, u32) = (words.get(at)?.parse().ok()?, before.get(at)?.parse().ok()?);
                (self.elapsed > 0.0).then(|| f64::from(now.wrapping_sub(then) & PSN_MASK) / self.elapsed)
            };
            let (sent, received) = (rate("sq_psn"), rate("rq_psn"));
            QpLine { words, sent, received }
        };
        Ok((names.clone(), lines.map(line).collect()))
    }

    /// Packets a second of the chosen process, sent and received, the newest last.
    pub(super) fn curve(&self) -> impl DoubleEndedIterator<Item = u64> {
        self.curve.iter().copied()
    }

    /// Whether the next look should ask `pid` for its queue pairs.
    pub(super) fn wants_qps_of(&self, pid: u32) -> bool {
        self.details == Details::QueuePairs && self.chosen == Some(pid)
    }

    /// The screen shows queue pairs, and the chosen process was not asked for them yet.
    pub(super) fn lacks_qps(&self) -> bool {
        self.details == Details::QueuePairs && self.user().is_some_and(|user| user.qps.is_none())
    }

    fn lines(&self) -> usize {
        match self.details {
            Details::Counters => self.counters().len(),
            Details::QueuePairs => self.queue_pairs().map_or(0, |(_, lines)| lines.len()),
        }
    }

    /// Moves what is chosen in the half that has the focus.
    pub(super) fn step(&mut self, by: isize) {
        let moved = |at: usize, len: usize| at.saturating_add_signed(by).min(len.saturating_sub(1));
        match self.focus {
            Focus::Processes => {
                let at = self.chosen.and_then(|pid| self.position(pid)).unwrap_or(0);
                self.choose(moved(at, self.users.len()));
            }
            Focus::Details => self.line = moved(self.line, self.lines()),
        }
    }

    pub(super) fn change_focus(&mut self) {
        self.focus = match self.focus {
            Focus::Processes => Focus::Details,
            Focus::Details => Focus::Processes,
        };
    }

    pub(super) fn show(&mut self, details: Details) {
        (self.details, self.line) = (details, 0);
    }

    pub(super) fn set_every(&mut self, seconds: u64) {
        self.every = seconds.clamp(1, LONGEST);
    }

    pub(super) fn pause(&mut self) {
        self.paused = !self.paused;
    }

    pub(super) fn is_paused(&self) -> bool {
        self.paused
    }

    /// Seconds between two looks.
    pub(super) fn every(&self) -> u64 {
        self.every
    }

    pub(super) fn focus(&self) -> Focus {
        self.focus
    }

    pub(super) fn details(&self) -> Details {
        self.details
    }

    /// The chosen line of the details.
    pub(super) fn line(&self) -> usize {
        self.line
    }
}

#[cfg(test)]
pub(super) mod tests {
    use starverbs_verbs::stat::Snapshot;

    use super::*;

    pub(in crate::top) fn user(pid: u32, sent: u64) -> User {
        let counters =
            [("tx_packets", sent), ("rx_packets", 2 * sent), ("drop_icrc", 1), ("drop_pkey", sent)];
        let counters = counters.map(|(name, value)| (name.to_owned(), value)).to_vec();
        let page = Snapshot { pid, port: 4791, first_block: 1, counters };
        User { pid, command: format!("prog{pid} -x"), page, qps: None }
    }

    pub(in crate::top) fn with_qps(mut user: User, sq_psn: u32) -> User {
        let names = "qpn state remote_qpn remote_gid path_mtu sq_psn rq_psn star link";
        let table = format!("{names}\n0x100 Rts 0x200 127.0.0.1 1024 {sq_psn} 5 - wire\n");
        user.qps = Some(Ok(table));
        user
    }

    #[test]
    fn rates_are_changes_by_the_second() {
        let mut model = Model::new(1);
        model.take(vec![user(7, 100)], Duration::ZERO);
        assert_eq!(model.rate(&user(7, 100), "tx_packets"), None);
        model.take(vec![user(7, 300), user(8, 4)], Duration::from_secs(2));
        let now = model.user().unwrap();
        assert_eq!(model.rate(now, "tx_packets"), Some(100.0));
        assert_eq!(model.rate(now, "drop_*"), Some(100.0));
        assert_eq!(model.rate(&user(8, 4), "tx_packets"), None);
        assert_eq!(model.curve().collect::<Vec<_>>(), [300]);
    }

    #[test]
    fn a_queue_pairs_rate_comes_from_its_psns() {
        let mut model = Model::new(1);
        model.show(Details::QueuePairs);
        model.take(vec![with_qps(user(7, 1), PSN_MASK)], Duration::ZERO);
        model.take(vec![with_qps(user(7, 1), 9)], Duration::from_secs(1));
        let (names, lines) = model.queue_pairs().unwrap();
        assert_eq!((names[0], lines.len()), ("qpn", 1));
        assert_eq!((lines[0].sent, lines[0].received), (Some(10.0), Some(0.0)));
    }

    #[test]
    fn what_is_chosen_stays_until_it_ends() {
        let mut model = Model::new(1);
        model.take(vec![user(7, 0), user(8, 0), user(9, 0)], Duration::ZERO);
        model.step(1);
        assert_eq!(model.chosen(), Some(8));
        model.take(vec![user(5, 0), user(8, 0)], Duration::from_secs(1));
        assert_eq!(model.chosen(), Some(8));
        model.take(vec![user(5, 0)], Duration::from_secs(1));
        assert_eq!(model.chosen(), Some(5));
        model.take(Vec::new(), Duration::from_secs(1));
        assert_eq!((model.chosen(), model.user().is_none()), (None, true));
        for by in [isize::MIN, -1, 1, isize::MAX] {
            model.step(by);
        }
    }

    #[test]
    fn queue_pairs_are_asked_for_only_where_they_are_shown() {
        let mut model = Model::new(1);
        model.take(vec![user(7, 0), user(8, 0)], Duration::ZERO);
        assert!(!model.wants_qps_of(7) && !model.lacks_qps());
        model.show(Details::QueuePairs);
        assert!(model.wants_qps_of(7) && !model.wants_qps_of(8) && model.lacks_qps());
        model.take(vec![with_qps(user(7, 0), 1), user(8, 0)], Duration::from_secs(1));
        assert!(!model.lacks_qps());
        model.step(1);
        assert!(model.wants_qps_of(8) && model.lacks_qps());
    }
}
