//! `starverbs top`: the counters of running programs, live, as rates.
//!
//! Owns the terminal, the keys and the pace. `model` has what is chosen and the rates, `screen` draws them.

mod model;
mod screen;

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use crate::users;
use crate::{Failure, users::User};
use model::{Details, Model};

/// Show the counters of running programs live, as rates; keys choose a program and its queue pairs.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only this process
    pid: Option<u32>,
    /// Seconds between two looks; keys + and - change it
    #[arg(
        long, value_name = "SECS", default_value_t = 1,
        value_parser = clap::value_parser!(u64).range(1..=60)
    )]
    every: u64,
}

/// Runs until the user leaves.
pub(crate) fn top(args: &Args) -> Result<(), Failure> {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return Err(Failure::new(
            2,
            "top needs a terminal; `starverbs stat --watch 1` prints the same as lines",
        ));
    }
    let failure = |error: io::Error| Failure::new(1, format!("the terminal: {error}"));
    // A process asked for by number that is not there is said before the screen is taken.
    let first = users::of(args.pid, |_| false)?;
    let mut terminal = ratatui::try_init().map_err(failure)?;
    let ended = watch(&mut terminal, args, first).map_err(failure);
    ratatui::restore();
    ended
}

fn watch(terminal: &mut DefaultTerminal, args: &Args, first: Vec<User>) -> io::Result<()> {
    let mut model = Model::new(args.every);
    let mut looked = Instant::now();
    model.take(first, Duration::ZERO);
    loop {
        terminal.draw(|frame| screen::draw(frame, &model))?;
        let left = Duration::from_secs(model.every()).saturating_sub(looked.elapsed());
        if event::poll(left)? {
            match event::read()? {
                Event::Key(key) if key.kind == KeyEventKind::Press => match press(&mut model, key) {
                    Next::Stay => continue,
                    Next::LookNow => {}
                    Next::Leave => return Ok(()),
                },
                _ => continue,
            }
        }
        if model.is_paused() {
            looked = Instant::now();
            continue;
        }
        // A process that ended meanwhile leaves an empty list, not an error.
        let seen = users::of(args.pid, |pid| model.wants_qps_of(pid)).unwrap_or_default();
        model.take(seen, looked.elapsed());
        looked = Instant::now();
    }
}

/// What follows from a key.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    Stay,
    /// What is shown needs something that was not asked for yet.
    LookNow,
    Leave,
}

fn press(model: &mut Model, key: KeyEvent) -> Next {
    match key.code {
        KeyCode::Char('q') | KeyCode::Esc => return Next::Leave,
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Next::Leave,
        KeyCode::Up | KeyCode::Char('k') => model.step(-1),
        KeyCode::Down | KeyCode::Char('j') => model.step(1),
        KeyCode::PageUp => model.step(-10),
        KeyCode::PageDown => model.step(10),
        KeyCode::Home => model.step(isize::MIN),
        KeyCode::End => model.step(isize::MAX),
        KeyCode::Tab | KeyCode::Left | KeyCode::Right | KeyCode::Enter => model.change_focus(),
        KeyCode::Char('c') => model.show(Details::Counters),
        KeyCode::Char('p') => model.show(Details::QueuePairs),
        KeyCode::Char('+') => model.set_every(model.every().saturating_add(1)),
        KeyCode::Char('-') => model.set_every(model.every().saturating_sub(1)),
        KeyCode::Char(' ') => model.pause(),
        _ => return Next::Stay,
    }
    if model.lacks_qps() { Next::LookNow } else { Next::Stay }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_leave_change_and_ask() {
        let mut model = Model::new(1);
        model.take(vec![model::tests::user(7, 0), model::tests::user(8, 0)], Duration::ZERO);
        let mut press = |code| press(&mut model, KeyEvent::new(code, KeyModifiers::NONE));
        assert_eq!(press(KeyCode::Down), Next::Stay);
        assert_eq!(press(KeyCode::Char('p')), Next::LookNow);
        assert_eq!(press(KeyCode::Char('c')), Next::Stay);
        assert_eq!(press(KeyCode::Char('q')), Next::Leave);
        assert_eq!(model.chosen(), Some(8));
    }

    #[test]
    fn without_a_terminal_it_says_what_to_use() {
        // Tests may have a terminal: then this would wait for keys.
        if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
            let failure = top(&Args { pid: None, every: 1 }).unwrap_err();
            assert!(failure.code == 2 && failure.message.contains("stat --watch"), "{failure:?}");
        }
    }
}
