//! Every file of the corpora and of what was found, before each oracle; and random input, as a fuzzer would
//! begin with it.

use std::path::{Path, PathBuf};

use starverbs_sim::Rng;
use starverbs_untrusted::ORACLES;

/// Random inputs for each oracle (STARVERBS_UNTRUSTED_RUNS: another number).
const RUNS: u64 = 200;

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let mut files: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    files.sort();
    files
}

#[test]
fn the_corpora_break_nothing() {
    let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus");
    for (name, check) in ORACLES {
        let files = files(&corpora.join(name));
        assert!(!files.is_empty(), "{name} has a corpus");
        for file in files {
            let input = std::fs::read(&file).expect("readable");
            /* what breaks is named by the panic's output */
            println!("{}", file.display());
            check(&input);
        }
    }
}

#[test]
fn random_input_breaks_nothing() {
    let runs = std::env::var("STARVERBS_UNTRUSTED_RUNS").ok().and_then(|runs| runs.parse().ok());
    for (name, check) in ORACLES {
        for seed in 0..runs.unwrap_or(RUNS) {
            let mut rng = Rng::new(seed);
            let mut input = vec![0; rng.below(1500) as usize];
            rng.fill(&mut input);
            /* random words are few that are small, and small numbers mean most */
            let small = rng.below(4);
            input.iter_mut().filter(|_| rng.below(4) < small).for_each(|byte| *byte &= 7);
            println!("{name}: seed {seed}");
            check(&input);
        }
    }
}
