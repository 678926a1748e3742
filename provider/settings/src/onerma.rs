//! The constants of 1RMA's congestion control that a person sets in place of the card's.

use std::fmt::{self, Write as _};
use std::time::Duration;

use crate::value;

/// What algorithm 1 of 1RMA is to use; `None`: what the card uses.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct OneRmaWindow {
    /// Additive increase, operations a round trip.
    pub increase: Option<f64>,
    /// Least factor of a decrease by delay.
    pub most_decrease: Option<f64>,
    /// How much of a delay's excess a decrease takes away.
    pub beta: Option<f64>,
    /// Factor of a decrease by a failure.
    pub failure_decrease: Option<f64>,
    /// Smallest window, operations.
    pub least: Option<f64>,
    /// Largest window, operations.
    pub most: Option<f64>,
    /// Window of a destination that nothing is known of, operations.
    pub initial: Option<f64>,
    /// Target of the issue delay.
    pub local_target: Option<Duration>,
    /// Target of the rest of a READ's delay.
    pub remote_target: Option<Duration>,
    /// The round trip that is assumed before one was seen.
    pub rtt: Option<Duration>,
}

/// Values of `STARVERBS_ONERMA_WINDOW`.
pub(crate) const SYNTAX: &str = "comma-separated increase=, most_decrease=, beta=, failure_decrease= \
                                 (numbers from 0.0001 to 1), least=, most=, initial= (operations, 0.0001 \
                                 to 65536), local_target=, remote_target=, rtt= (times with their units, \
                                 up to 1s); or auto";

/// A share, or a step.
const ONE: f64 = 1.0;
/// A window that sends next to nothing; and a share of which less is none.
const LEAST: f64 = 1e-4;
/// More operations than a card has slots.
const MANY: f64 = 65_536.0;
const LONGEST: Duration = Duration::from_secs(1);

type Number = fn(&mut OneRmaWindow) -> &mut Option<f64>;
type Time = fn(&mut OneRmaWindow) -> &mut Option<Duration>;

const NUMBERS: [(&str, f64, Number); 7] = [
    ("increase", ONE, |window| &mut window.increase),
    ("most_decrease", ONE, |window| &mut window.most_decrease),
    ("beta", ONE, |window| &mut window.beta),
    ("failure_decrease", ONE, |window| &mut window.failure_decrease),
    ("least", MANY, |window| &mut window.least),
    ("most", MANY, |window| &mut window.most),
    ("initial", MANY, |window| &mut window.initial),
];

const TIMES: [(&str, Time); 3] = [
    ("local_target", |window| &mut window.local_target),
    ("remote_target", |window| &mut window.remote_target),
    ("rtt", |window| &mut window.rtt),
];

impl OneRmaWindow {
    /// Parses `increase=0.25,rtt=50us`; `auto` is none.
    ///
    /// # Errors
    /// A sentence with the part that cannot be understood.
    pub fn parse(text: &str) -> Result<Option<OneRmaWindow>, String> {
        if text == "auto" {
            return Ok(None);
        }
        let mut window = OneRmaWindow::default();
        for part in text.split(',').map(str::trim) {
            let (name, given) = part.split_once('=').ok_or_else(|| format!("{part:?} is not NAME=VALUE"))?;
            let read = window.set(name.trim(), given.trim());
            read.map_err(|reason| format!("{name}={given}: {reason}"))?;
        }
        let (least, most) = (window.least.unwrap_or(0.0), window.most.unwrap_or(MANY));
        if least <= most { Ok(Some(window)) } else { Err("least= is more than most=".to_owned()) }
    }

    fn set(&mut self, name: &str, given: &str) -> Result<(), String> {
        if let Some((.., most, field)) = NUMBERS.iter().find(|(known, ..)| *known == name) {
            let number = given.parse().ok().filter(|number| (LEAST..=*most).contains(number));
            return once(field(self), number.ok_or_else(|| format!("not a number from {LEAST} to {most}"))?);
        }
        let Some((_, field)) = TIMES.iter().find(|(known, _)| *known == name) else {
            return Err("there is no such part".to_owned());
        };
        let time = value::duration(given)?;
        if time.is_zero() || time > LONGEST {
            Err("not above 0, up to 1s".to_owned())
        } else {
            once(field(self), time)
        }
    }
}

fn once<T>(field: &mut Option<T>, value: T) -> Result<(), String> {
    if field.replace(value).is_some() { Err("given twice".to_owned()) } else { Ok(()) }
}

impl fmt::Display for OneRmaWindow {
    /// Writes what [`OneRmaWindow::parse`] reads.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut copy, mut text) = (*self, String::new());
        for (name, _, field) in NUMBERS {
            if let Some(number) = field(&mut copy) {
                write!(text, "{name}={number},")?;
            }
        }
        for (name, field) in TIMES {
            if let Some(time) = field(&mut copy) {
                write!(text, "{name}={}ns,", time.as_nanos())?;
            }
        }
        f.write_str(text.trim_end_matches(','))
    }
}
