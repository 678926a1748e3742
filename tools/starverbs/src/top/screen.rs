//! Draws `starverbs top`. It must not change what it draws.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Paragraph, Row, Sparkline, Table, TableState};

use super::model::{Details, Focus, Model, QpLine};

const KEYS: &str = " \u{2191}\u{2193} choose   Tab other half   c counters   p queue pairs   \
                    +/- pace   space pause   q quit";

/// Columns of the list of processes: heading and counter, as changes by the second.
const COLUMNS: [(&str, &str, f64); 8] = [
    ("tx pkt/s", "tx_packets", 1.0),
    ("rx pkt/s", "rx_packets", 1.0),
    ("tx MB/s", "tx_bytes", 1e6),
    ("rx MB/s", "rx_bytes", 1e6),
    ("compl/s", "completions", 1.0),
    ("resent/s", "retransmitted", 1.0),
    ("drops/s", "drop_*", 1.0),
    ("errors/s", "error_completions", 1.0),
];

/// Draws the whole screen.
pub(super) fn draw(frame: &mut Frame, model: &Model) {
    let list = (model.users().len() as u16).saturating_add(3).clamp(4, (frame.area().height / 2).max(4));
    let parts = [Constraint::Length(1), Constraint::Length(list), Constraint::Fill(1), Constraint::Length(1)];
    let [head, processes, details, keys] = Layout::vertical(parts).areas(frame.area());
    frame.render_widget(headline(model), head);
    draw_processes(frame, model, processes);
    match model.details() {
        Details::Counters => draw_counters(frame, model, details),
        Details::QueuePairs => draw_queue_pairs(frame, model, details),
    }
    frame.render_widget(Paragraph::new(KEYS).style(Modifier::DIM), keys);
}

fn headline(model: &Model) -> Paragraph<'static> {
    let processes = match model.users().len() {
        0 => "no process that you may look into uses the card".to_owned(),
        1 => "1 process".to_owned(),
        many => format!("{many} processes"),
    };
    let pace = if model.is_paused() { "paused".to_owned() } else { format!("every {} s", model.every()) };
    Paragraph::new(format!(" starverbs top   {processes}   {pace}")).style(Modifier::BOLD)
}

fn draw_processes(frame: &mut Frame, model: &Model, area: Rect) {
    let rows = model.users().iter().map(|user| {
        let mut cells = vec![user.pid.to_string(), user.command.clone()];
        cells.extend(COLUMNS.iter().map(|(_, name, unit)| number(model.rate(user, name).map(|r| r / unit))));
        cells.push(user.counter("qps").unwrap_or(0).to_string());
        row(cells, 2)
    });
    let mut heads = vec!["pid".to_owned(), "command".to_owned()];
    heads.extend(COLUMNS.iter().map(|(head, ..)| (*head).to_owned()));
    heads.push("QPs".to_owned());
    let mut widths = vec![Constraint::Length(7), Constraint::Min(12)];
    widths.extend([Constraint::Length(9); COLUMNS.len()]);
    widths.push(Constraint::Length(7));
    let table = list(rows.collect(), row(heads, 2), widths, block("processes", model, Focus::Processes));
    let at = model.chosen().and_then(|pid| model.position(pid));
    frame.render_stateful_widget(table, area, &mut TableState::new().with_selected(at));
}

fn draw_counters(frame: &mut Frame, model: &Model, area: Rect) {
    let [table, curve] = Layout::horizontal([Constraint::Max(64), Constraint::Fill(1)]).areas(area);
    let rows = model
        .counters()
        .into_iter()
        .map(|(name, value, rate)| row(vec![name.to_owned(), value.to_string(), number(rate)], 1));
    let widths = vec![Constraint::Min(31), Constraint::Length(16), Constraint::Length(12)];
    let heads = ["counter", "now", "by second"].map(str::to_owned).to_vec();
    let title = model.chosen().map_or("counters".to_owned(), |pid| format!("counters of {pid}"));
    let widget = list(rows.collect(), row(heads, 1), widths, block(&title, model, Focus::Details));
    frame.render_stateful_widget(widget, table, &mut TableState::new().with_selected(line(model)));
    draw_curve(frame, model, curve);
}

/// Packets by the second, the newest at the right.
fn draw_curve(frame: &mut Frame, model: &Model, area: Rect) {
    let inner = usize::from(area.width.saturating_sub(2));
    let mut shown: Vec<u64> = model.curve().rev().take(inner).collect();
    shown.reverse();
    let most = shown.iter().max().copied().unwrap_or(0);
    let title = format!(" packets/s, at most {} ", number(Some(most as f64)));
    frame.render_widget(Sparkline::default().data(&shown).block(Block::bordered().title(title)), area);
}

fn draw_queue_pairs(frame: &mut Frame, model: &Model, area: Rect) {
    let title = model.chosen().map_or("queue pairs".to_owned(), |pid| format!("queue pairs of {pid}"));
    let block = block(&title, model, Focus::Details);
    let (names, lines) = match model.queue_pairs() {
        Ok(shown) => shown,
        Err(reason) => {
            let text = Line::from(format!("{}: {reason}", model.chosen().unwrap_or(0)));
            return frame.render_widget(Paragraph::new(text).block(block), area);
        }
    };
    let mut heads: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    heads.extend(["sent/s", "received/s"].map(str::to_owned));
    let widths: Vec<Constraint> = (0..heads.len())
        .map(|at| {
            let words = lines.iter().filter_map(|line| line.words.get(at)).map(String::len);
            Constraint::Length(words.chain([heads[at].len(), 10]).max().unwrap_or(10) as u16)
        })
        .collect();
    let columns = names.len();
    let cells = |line: QpLine| {
        let mut cells = line.words;
        cells.resize(columns, String::new());
        cells.extend([number(line.sent), number(line.received)]);
        row(cells, 0)
    };
    let table = list(lines.into_iter().map(cells).collect(), row(heads, 0), widths, block);
    frame.render_stateful_widget(table, area, &mut TableState::new().with_selected(line(model)));
}

/// The chosen line of the details, if the arrows move there.
fn line(model: &Model) -> Option<usize> {
    (model.focus() == Focus::Details).then_some(model.line())
}

fn list<'a>(rows: Vec<Row<'a>>, head: Row<'a>, widths: Vec<Constraint>, block: Block<'a>) -> Table<'a> {
    Table::new(rows, widths)
        .header(head.style(Modifier::BOLD))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
        .block(block)
}

fn block<'a>(title: &str, model: &Model, focus: Focus) -> Block<'a> {
    let style = if model.focus() == focus { Modifier::BOLD } else { Modifier::DIM };
    Block::bordered().title(format!(" {title} ")).border_style(style)
}

/// A row whose cells from `left` on are numbers, and so end at the right.
fn row<'a>(cells: Vec<String>, left: usize) -> Row<'a> {
    let cell = |(at, text): (usize, String)| {
        let text = Line::from(text);
        if at < left { text.left_aligned() } else { text.right_aligned() }
    };
    Row::new(cells.into_iter().enumerate().map(cell).collect::<Vec<_>>())
}

/// A rate in few characters; nothing where there is none yet.
fn number(rate: Option<f64>) -> String {
    match rate {
        None => String::new(),
        Some(0.0) => "0".to_owned(),
        Some(rate) if rate.abs() < 100.0 => format!("{rate:.1}"),
        Some(rate) if rate.abs() < 1e6 => format!("{rate:.0}"),
        Some(rate) => format!("{:.2}M", rate / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::model::tests::{user, with_qps};
    use super::*;

    fn lines(model: &Model, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, model)).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let cells: Vec<&str> = buffer.content().iter().map(ratatui::buffer::Cell::symbol).collect();
        cells.chunks(usize::from(width)).map(|line| line.concat()).collect()
    }

    fn twice(details: Details) -> Model {
        let mut model = Model::new(1);
        model.show(details);
        model.take(vec![with_qps(user(7, 100), 5), user(8, 0)], Duration::ZERO);
        model.take(vec![with_qps(user(7, 12_000_100), 15), user(8, 0)], Duration::from_secs(1));
        model
    }

    fn words(line: &str) -> Vec<&str> {
        line.split(|c: char| !c.is_ascii_graphic()).filter(|word| !word.is_empty()).collect()
    }

    #[test]
    fn processes_stand_with_their_rates() {
        let screen = lines(&twice(Details::Counters), 140, 24);
        assert!(screen[0].contains("2 processes") && screen[0].contains("every 1 s"), "{screen:#?}");
        let shown = words(&screen[3]);
        assert_eq!(&shown[..5], ["7", "prog7", "-x", "12.00M", "24.00M"], "{screen:#?}");
        let counter = screen.iter().find(|line| line.contains("tx_packets")).unwrap();
        assert_eq!(&words(counter)[..3], ["tx_packets", "12000100", "12.00M"], "{screen:#?}");
        assert!(screen.iter().any(|line| line.contains("packets/s, at most 36.00M")), "{screen:#?}");
    }

    #[test]
    fn queue_pairs_stand_with_their_rates() {
        let screen = lines(&twice(Details::QueuePairs), 140, 24);
        let qp = screen.iter().find(|line| line.contains("0x100")).unwrap();
        assert_eq!(words(qp).iter().rev().take(2).collect::<Vec<_>>(), [&"0", &"10.0"], "{screen:#?}");
    }

    #[test]
    fn any_size_of_terminal_will_do() {
        for (width, height) in [(1, 1), (20, 3), (80, 5), (300, 100)] {
            for details in [Details::Counters, Details::QueuePairs] {
                assert_eq!(lines(&twice(details), width, height).len(), usize::from(height));
            }
            assert_eq!(lines(&Model::new(1), width, height).len(), usize::from(height));
        }
    }
}
