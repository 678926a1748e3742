//! The row of small exchanges of peer.c: what both ends say must be what they say when both are rxe, but for
//! the few steps where rxe departs from the IBTA rules that the card here keeps.

use crate::pair::{Pair, Providers, RXE_ALONE};
use crate::world::{Provider, World};

/// Where rxe's own lines are no measure: the step, the provider that speaks, its role, what its line must
/// hold, and the rule.
struct Rule(&'static str, Provider, Role, &'static str, &'static str);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Server,
    Client,
}

const TOO_SMALL: &str = "IBTA: a SEND that is longer than its receive is NAK Invalid Request, and a local \
                         length error at the receiver";
const RULES: [Rule; 6] = [
    Rule(
        "rc send, receive too small",
        Provider::Star,
        Role::Server,
        "received local length error",
        TOO_SMALL,
    ),
    Rule(
        "rc send, receive too small",
        Provider::Rxe,
        Role::Client,
        "sent remote invalid request error",
        TOO_SMALL,
    ),
    Rule(
        "rc send of 3 packets, receive too small",
        Provider::Star,
        Role::Server,
        "received local length error",
        TOO_SMALL,
    ),
    Rule(
        "rc send of 3 packets, receive too small",
        Provider::Rxe,
        Role::Client,
        "sent remote invalid request error",
        TOO_SMALL,
    ),
    Rule(
        "uc send, receive too small",
        Provider::Star,
        Role::Server,
        "qp RTS",
        "IBTA: on UC such a message is dropped, and the receive stays",
    ),
    Rule(
        "rc send, bad lkey",
        Provider::Star,
        Role::Client,
        "sent local protection error",
        "IBTA: a local key that does not fit is a local protection error",
    ),
];

/// What the two ends of rxe alone said, with which the others are compared.
pub(crate) struct Reference {
    pair: Pair,
    ends: [Vec<String>; 2],
}

/// A line that is other than rxe's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Difference {
    /// The step, the role and the provider.
    pub step: String,
    /// What rxe says there when it talks to itself.
    pub rxe: String,
    /// What was said here.
    pub here: String,
    /// The rule that asks for it; without one, it is a failure.
    pub rule: Option<&'static str>,
}

/// What a row came to.
pub(crate) struct Row {
    /// Lines compared.
    pub lines: usize,
    pub differences: Vec<Difference>,
}

impl Reference {
    /// Lets rxe talk to itself.
    pub(crate) fn new(world: &mut World, pair: Pair) -> Result<Reference, String> {
        let ends = pair.run(world, RXE_ALONE)?.map(|output| lines(&output));
        Ok(Reference { pair, ends })
    }

    /// Runs the row between `providers` and compares.
    pub(crate) fn compare(&self, world: &mut World, providers: Providers) -> Result<Row, String> {
        let ends = self.pair.run(world, providers)?.map(|output| lines(&output));
        let roles = [(Role::Server, providers.server), (Role::Client, providers.client)];
        let mut row = Row { lines: 0, differences: Vec::new() };
        for ((role, provider), (here, reference)) in roles.into_iter().zip(ends.iter().zip(&self.ends)) {
            if here.len() != reference.len() {
                return Err(format!("{role:?} made {} steps, rxe alone {}", here.len(), reference.len()));
            }
            for (at, (here, reference)) in here.iter().zip(reference).enumerate() {
                // What rxe's client does not even begin, its server has never seen.
                if !self.ends[1][at].contains("; refused") {
                    row.lines += 1;
                    row.differences.extend(difference(role, provider, here, reference));
                }
            }
        }
        Ok(row)
    }
}

fn difference(role: Role, provider: Provider, here: &str, reference: &str) -> Option<Difference> {
    if here == reference {
        return None;
    }
    let (step, said) = here.split_once("; ").unwrap_or((here, ""));
    let rule = RULES
        .iter()
        .find(|rule| rule.0 == step && rule.1 == provider && rule.2 == role && said.contains(rule.3))
        .map(|rule| rule.4);
    let rxe = reference.split_once("; ").unwrap_or((reference, "")).1.to_owned();
    Some(Difference { step: format!("{step} ({role:?} on {provider})"), rxe, here: said.to_owned(), rule })
}

/// The lines of an end, without its asynchronous events: rxe 6.1 raises none for a peer's mistakes, the IBTA
/// rules do.
fn lines(output: &str) -> Vec<String> {
    let without_events = |line: &str| {
        line.split("; ").filter(|part| !part.starts_with("event ")).collect::<Vec<_>>().join("; ")
    };
    output.lines().map(without_events).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_rule_asks_for_may_differ() {
        let differs = |provider, here: &str| {
            difference(Role::Client, provider, here, "rc send, bad lkey; sent local QP operation error")
        };
        assert_eq!(differs(Provider::Star, "rc send, bad lkey; sent local QP operation error"), None);
        assert!(
            differs(Provider::Star, "rc send, bad lkey; sent local protection error").unwrap().rule.is_some()
        );
        assert!(differs(Provider::Star, "rc send, bad lkey; sent success").unwrap().rule.is_none());
        assert!(
            differs(Provider::Rxe, "rc send, bad lkey; sent local protection error").unwrap().rule.is_none()
        );
    }

    #[test]
    fn events_are_left_out() {
        assert_eq!(lines("a; qp ERR; event x y\nb; data own\n"), ["a; qp ERR", "b; data own"]);
    }
}
