//! A case: what is run, where, and what came of it.

use std::fmt;
use std::rc::Rc;

use crate::pair::Pair;
use crate::world::World;

/// Between which two places the programs talk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Net {
    /// Two processes over 127.0.0.1.
    Lo,
    /// Two network namespaces joined by veth with 1500 bytes of IP MTU, hence a path MTU of 1024.
    Veth,
    /// The same with 9000 bytes, hence a path MTU of 4096.
    Jumbo,
}

impl fmt::Display for Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Net::Lo => "loopback",
            Net::Veth => "veth 1500",
            Net::Jumbo => "veth 9000",
        })
    }
}

/// Both places that every program must run in.
pub(crate) const BOTH: &[Net] = &[Net::Lo, Net::Veth];
/// For programs that want a path MTU of 4096.
pub(crate) const LARGE: &[Net] = &[Net::Lo, Net::Jumbo];

/// What came of a case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Ran and its output is plausible; a short remark, such as the figure that the program printed.
    Pass(String),
    /// Did not run, and why.
    Skip(String),
    /// What went wrong, with the end of the programs' output.
    Fail(String),
}

impl From<Result<String, String>> for Verdict {
    fn from(result: Result<String, String>) -> Self {
        result.map_or_else(Verdict::Fail, Verdict::Pass)
    }
}

/// What a case does.
type Body = Rc<dyn Fn(&mut World, Net) -> Verdict>;

/// One thing to try, in one or several nets.
#[derive(Clone)]
pub(crate) struct Case {
    /// Heading in the table.
    pub group: &'static str,
    /// The command or a sentence.
    pub name: String,
    /// The nets in which it can run.
    pub nets: &'static [Net],
    /// The nets in which it belongs to the quick set.
    pub quick: &'static [Net],
    /// Why it is of the card in software alone, if it is.
    pub software: Option<&'static str>,
    body: Body,
}

impl Case {
    /// A server and a client, named after their command.
    pub(crate) fn pair(group: &'static str, nets: &'static [Net], pair: Pair) -> Case {
        let name = pair.title();
        let body = Rc::new(move |world: &mut World, net| pair.run(world, net).into());
        Case { group, name, nets, quick: &[], software: None, body }
    }

    /// Something of its own.
    pub(crate) fn special(
        group: &'static str,
        name: &str,
        nets: &'static [Net],
        body: impl Fn(&mut World, Net) -> Verdict + 'static,
    ) -> Case {
        Case { group, name: name.to_owned(), nets, quick: nets, software: None, body: Rc::new(body) }
    }

    /// The same, in the quick set for `nets`.
    pub(crate) fn quick(mut self, nets: &'static [Net]) -> Case {
        self.quick = nets;
        self
    }

    /// Not for a board, for that reason.
    pub(crate) fn of_software(mut self, reason: &'static str) -> Case {
        self.software = Some(reason);
        self
    }

    pub(crate) fn title(&self) -> String {
        format!("{}: {}", self.group, self.name)
    }

    pub(crate) fn run(&self, world: &mut World, net: Net) -> Verdict {
        (self.body)(world, net)
    }
}
