//! The simulated cards against closed forms.

use std::ops::ControlFlow;

use starverbs_sim::rnic::{DEFAULT_PARAMS, Outcome, Params, Settings, run};

fn outcome(settings: &[(&str, toml::Value)]) -> Outcome {
    let settings: Settings =
        settings.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    let params = Params::read(DEFAULT_PARAMS, &[&settings]).unwrap();
    run(&params, |_| ControlFlow::Continue(())).unwrap()
}

#[test]
fn try_it() {
    for policy in ["fcfs", "non-blocking", "latency-hiding"] {
        for qps in [10, 100, 300, 400, 1000, 10000, 51200] {
            let at = std::time::Instant::now();
            let r = outcome(&[("qpc.policy", policy.into()), ("workload.qps", qps.into())]);
            let l = outcome(&[
                ("qpc.policy", policy.into()),
                ("workload.qps", qps.into()),
                ("workload.kind", "latency".into()),
            ]);
            eprintln!(
                "{policy} {qps}: {:.2} Mop/s {:.3} us (p99 {:.3}) busy {:.2} {} msgs {} events {:.2?} hits {} misses {} waited {}",
                r.rate / 1e6,
                l.latency * 1e6,
                l.latency_p99 * 1e6,
                r.read_busy,
                r.messages,
                r.events,
                at.elapsed(),
                r.server.hits,
                r.server.misses,
                r.server.waited
            );
        }
    }
}
