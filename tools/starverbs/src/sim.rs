//! `starverbs sim`: carries out simulation plans and shows their figures beside the paper's.

use std::fs;
use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use starverbs_charts::{Lines, Series, lines};
use starverbs_sim::rnic::{DEFAULT_PARAMS, PAPERS, PLANS, Plan, Report, Statements};
use starverbs_sim::{Figure, figures as coded};

use crate::Failure;

/// Simulate RDMA cards, and compare with the paper's figures.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A shipped figure (`csrna-7b`), all of a paper (`1rma`) or of all, `all`, or a file with a plan
    /// (PLAN.toml); without one, lists the figures
    #[arg(value_name = "FIGURE|PLAN")]
    figures: Vec<String>,
    /// Write NAME.csv and NAME.svg there; of a paper also the page that shows them, and with `all` README.md
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print the points as JSON
    #[arg(long)]
    json: bool,
    /// Take the parameters from FILE instead of the shipped ones
    #[arg(long, value_name = "FILE")]
    params: Option<PathBuf>,
    /// Runs at the same time; the result does not depend on it
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Say how many events a second were simulated, on stderr
    #[arg(long)]
    time: bool,
    /// Print the shipped parameters with their sources, as a file for --params
    #[arg(long)]
    show_params: bool,
}

/// The picture of a figure.
fn chart(report: &Report) -> Lines {
    let mut series: Vec<Series> = Vec::new();
    for row in &report.rows {
        if series.last().is_none_or(|last| last.name != row.series) {
            series.push(Series { name: row.series.clone(), points: Vec::new(), rings: Vec::new() });
        }
        if let Some(last) = series.last_mut() {
            last.points.push((row.x, row.here));
            last.rings.extend(row.paper.filter(|_| row.is_text).map(|paper| (row.x, paper)));
        }
    }
    Lines {
        title: report.title.clone(),
        x: report.x.clone(),
        steps: Vec::new(),
        y: report.y.clone(),
        zero_based: report.zero_based,
        reference: "the paper",
        series,
    }
}

pub(crate) fn sim(args: &Args) -> Result<(), Failure> {
    if args.show_params {
        print!("{DEFAULT_PARAMS}");
        return Ok(());
    }
    if args.figures.is_empty() {
        for (name, text) in PLANS {
            println!("{name:14} {}", read_plan(name, text)?.title);
        }
        for figure in coded() {
            println!("{:14} {}", figure.name, figure.title);
        }
        return Ok(());
    }
    let params = match &args.params {
        Some(file) => read_file(file)?,
        None => DEFAULT_PARAMS.to_owned(),
    };
    let plans = plans(&args.figures)?;
    let mut reports = Vec::new();
    let began = Instant::now();
    for (name, plan) in plans {
        let report = match plan {
            Work::Plan(plan) => carry_out(&name, *plan, &params, args.threads)?,
            Work::Figure(figure) => figure.carry_out(),
        };
        if let Some(folder) = &args.out {
            write_file(&folder.join(format!("{name}.csv")), &report.csv())?;
            write_file(&folder.join(format!("{name}.svg")), &lines(&chart(&report)))?;
        }
        if !args.json {
            println!("{}\n\n{}", report.title, report.table());
        }
        reports.push(report);
    }
    if args.time {
        let (events, seconds) =
            (reports.iter().map(Report::events).sum::<u64>(), began.elapsed().as_secs_f64());
        eprintln!("{events} events in {seconds:.3} s, {:.2} M/s", events as f64 / seconds / 1e6);
    }
    if let Some(folder) = &args.out {
        write_pages(folder, &args.figures, &reports)?;
    }
    if args.json {
        let json = serde_json::to_string_pretty(&reports).map_err(|error| Failure::new(1, error))?;
        println!("{json}");
    }
    Ok(())
}

/// What is to be run.
enum Work {
    Plan(Box<Plan>),
    /// One that is code, with parameters of its own: 1RMA's, StRoM's
    Figure(&'static Figure),
}

/// Names of what was asked for, and what it is.
fn plans(figures: &[String]) -> Result<Vec<(String, Work)>, Failure> {
    let plan = |plan: Plan| Work::Plan(Box::new(plan));
    let code = |figure: &'static Figure| (figure.name.to_owned(), Work::Figure(figure));
    let mut plans = Vec::new();
    for figure in figures {
        let of_paper = |name: &str| name.split_once('-').is_some_and(|(paper, _)| paper == figure);
        if figure == "all" || PAPERS.iter().any(|(paper, ..)| paper == figure) {
            for (name, text) in PLANS.iter().filter(|(name, _)| figure == "all" || of_paper(name)) {
                plans.push(((*name).to_owned(), plan(read_plan(name, text)?)));
            }
            plans.extend(coded().filter(|one| figure == "all" || of_paper(one.name)).map(code));
        } else if let Some(known) = coded().find(|known| known.name == figure) {
            plans.push(code(known));
        } else if let Some(text) = Plan::shipped(figure) {
            plans.push((figure.clone(), plan(read_plan(figure, text)?)));
        } else if figure.ends_with(".toml") {
            let path = Path::new(figure);
            let name = path.file_stem().map_or(figure.clone(), |name| name.to_string_lossy().into_owned());
            plans.push((name, plan(read_plan(figure, &read_file(path)?)?)));
        } else {
            return Err(Failure::new(
                2,
                format!("there is no figure `{figure}`; `starverbs sim` lists them"),
            ));
        }
    }
    Ok(plans)
}

fn read_plan(name: &str, text: &str) -> Result<Plan, Failure> {
    Plan::read(text).map_err(|error| Failure::new(2, format!("{name}: {error}")))
}

fn carry_out(name: &str, plan: Plan, params: &str, threads: Option<usize>) -> Result<Report, Failure> {
    let threads = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let shown = AtomicU64::new(u64::MAX);
    let bar = std::io::stderr().is_terminal();
    let progress = |share: f64| {
        let percent = (share * 100.0) as u64;
        if bar && shown.swap(percent, Ordering::Relaxed) != percent {
            let done = (percent / 4).min(25) as usize;
            eprint!("\r{name:14} [{}{}] {percent:3}%", "#".repeat(done), "-".repeat(25 - done));
            let _ = std::io::stderr().flush();
        }
        ControlFlow::Continue(())
    };
    let finished = plan.carry_out(params, threads, progress);
    if bar {
        eprint!("\r\x1b[K");
    }
    finished
        .map(|finished| Report::new(name, &finished))
        .map_err(|error| Failure::new(1, format!("{name}: {error}")))
}

/// A page for each paper that was asked for, and with all of them one that leads to them.
fn write_pages(folder: &Path, figures: &[String], reports: &[Report]) -> Result<(), Failure> {
    let mut index = String::from(INDEX);
    let asked = |name: &str| figures.iter().any(|figure| figure == "all" || figure == name);
    for (name, title, statements) in PAPERS.iter().filter(|(name, ..)| asked(name)) {
        let (page, [hold, fail, unasked]) = page(name, title, statements, reports)?;
        write_file(&folder.join(format!("{name}.md")), &page)?;
        index.push_str(&format!("| [{title}]({name}.md) | {hold} | {fail} | {unasked} |\n"));
    }
    if asked("all") { write_file(&folder.join("README.md"), &index) } else { Ok(()) }
}

const INDEX: &str = "# Figures

Made by `make figures` (`starverbs sim all --out docs/figures`); two runs give the same bytes.
[../sim.md](../sim.md) says how the simulator works and what it takes from where.

The papers are judged by their sentences: each that claims something measurable is a row, and
whether it holds is computed from the figures. Points of the papers in tables say where they are
from: their *text*, or *derived* by a formula, which is no evidence. Rings in pictures are points of
the text. Nothing was read off the papers' pictures.

| paper | sentences that hold | that do not | not asked |
|---|---|---|---|
";

/// A paper's page: its statements, its figures; and how many statements hold, do not, and are not asked.
fn page(
    name: &str,
    title: &str,
    statements: &str,
    reports: &[Report],
) -> Result<(String, [usize; 3]), Failure> {
    let statements = Statements::read(statements).map_err(|error| Failure::new(1, error))?;
    let (table, counts) = statements.table(reports);
    let mut text = format!("# {title}\n\n## Statements\n\n{}\n\n{table}", statements.bounds.trim());
    let own = |report: &&Report| report.name.split_once('-').is_some_and(|(paper, _)| paper == name);
    for report in reports.iter().filter(own) {
        text.push_str(&format!("\n## {}\n\n![{}]({}.svg)\n\n", report.title, report.title, report.name));
        if report.rows.iter().any(|row| row.paper.is_some()) {
            text.push_str(&format!("{}\n", report.table()));
        }
        text.push_str(&format!("{}\n", report.note.trim()));
    }
    Ok((text, counts))
}

fn read_file(path: &Path) -> Result<String, Failure> {
    fs::read_to_string(path).map_err(|error| Failure::new(1, format!("{}: {error}", path.display())))
}

fn write_file(path: &Path, text: &str) -> Result<(), Failure> {
    let written = path.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::write(path, text));
    written.map_err(|error| Failure::new(1, format!("{}: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shipped_names_files_and_nothing_else_are_plans() {
        let names = |figures: &[&str]| {
            let figures: Vec<String> = figures.iter().map(|figure| (*figure).to_owned()).collect();
            plans(&figures).map(|plans| plans.into_iter().map(|(name, _)| name).collect::<Vec<_>>())
        };
        assert_eq!(names(&["csrna-7b"]).unwrap(), ["csrna-7b"]);
        assert_eq!(names(&["1rma-11a"]).unwrap(), ["1rma-11a"]);
        assert_eq!(names(&["strom-5a"]).unwrap(), ["strom-5a"]);
        let of = |paper| coded().filter(|figure| figure.name.starts_with(paper)).count();
        assert_eq!(names(&["1rma"]).unwrap().len(), of("1rma-"));
        assert_eq!(names(&["strom"]).unwrap().len(), of("strom-"));
        assert_eq!(names(&["all"]).unwrap().len(), PLANS.len() + coded().count());
        assert_eq!(names(&["csrna-99"]).unwrap_err().code, 2);
        assert_eq!(names(&["no-such-file.toml"]).unwrap_err().code, 1);
    }

    #[test]
    fn the_page_of_figures_is_that_of_the_shipped_plans() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/figures");
        for (name, text) in PLANS {
            let (paper, _) = name.split_once('-').unwrap();
            let page = fs::read_to_string(folder.join(format!("{paper}.md"))).unwrap();
            let plan = read_plan(name, text).unwrap();
            let whole = page.contains(&format!("\n## {}\n", plan.title)) && page.contains(plan.note.trim());
            assert!(
                whole,
                "{name}: the page in docs/figures is older than the plan; `make figures` rewrites it"
            );
            assert!(folder.join(format!("{name}.svg")).exists(), "{name}");
        }
        for Figure { name, title, note, .. } in coded() {
            let (paper, _) = name.split_once('-').unwrap();
            let page = fs::read_to_string(folder.join(format!("{paper}.md"))).unwrap();
            assert!(page.contains(&format!("\n## {title}\n")) && page.contains(note.trim()), "{name}");
            assert!(folder.join(format!("{name}.svg")).exists(), "{name}");
        }
    }

    #[test]
    fn the_pages_judge_each_statement() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/figures");
        for (paper, _, text) in PAPERS {
            let page = fs::read_to_string(folder.join(format!("{paper}.md"))).unwrap();
            let all = Statements::read(text).unwrap().statement;
            for statement in &all {
                let row = format!("\n| {} | {} | ", statement.section, statement.text);
                assert!(page.contains(&row), "{paper}.md is older than its statements: {}", statement.text);
            }
        }
    }

    #[test]
    fn a_figure_without_runs_is_written_whole() {
        let folder = std::env::temp_dir().join(format!("starverbs-sim-{}", std::process::id()));
        let args = Args {
            figures: vec!["csrna-table1".to_owned()],
            out: Some(folder.clone()),
            json: true,
            params: None,
            threads: Some(1),
            time: true,
            show_params: false,
        };
        sim(&args).unwrap();
        let csv = fs::read_to_string(folder.join("csrna-table1.csv")).unwrap();
        let svg = fs::read_to_string(folder.join("csrna-table1.svg")).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(csv.lines().count(), 10);
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
    }
}
