use std::collections::HashMap;
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use super::*;

fn env(pairs: &[(&str, &str)]) -> Result<Settings, SettingsError> {
    Settings::from_sources(pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())), None)
}

fn file(text: &str) -> Result<Settings, SettingsError> {
    Settings::from_sources(std::iter::empty(), Some(text))
}

fn message(result: Result<Settings, SettingsError>) -> String {
    result.expect_err("should be refused").to_string()
}

#[test]
fn nothing_set_is_the_default() {
    assert_eq!(env(&[("HOME", "/root"), ("STARVERBS", "x")]).unwrap(), Settings::default());
}

#[test]
fn every_key_reads_back_what_it_shows() {
    let given = [
        ("DEVICE", "board:/run/b.sock"),
        ("BOARD_DOORBELL", "message"),
        ("FAULT", "loss=0.01,dup=0.5,delay=50000ns,seed=7"),
        ("PCAP", "/tmp/a-%p.pcap"),
        ("MTU", "1024"),
        ("ADDRS", "10.0.0.1,fd00::1"),
        ("PORT", "14791"),
        ("LINK", "udp"),
        ("LINK_TRUST", "none"),
        ("SHARE", "malloc"),
        ("RCVBUF", "8M"),
        ("SNDBUF", "96K"),
        ("GSO", "off"),
        ("GRO", "off"),
        ("PROGRESS_THREAD", "off"),
        ("LOG", "debug"),
        ("WINDOW", "1000"),
        ("DELAY_TARGET", "50000ns"),
        ("MEMORY", "8192M"),
        ("DEFER", "off"),
        ("REPEAT", "off"),
        ("CREDITS", "on"),
        ("QPC_PREFETCH", "off"),
        ("QPC_CACHE", "300,miss=500ns,fetch=0ns,policy=fcfs"),
        ("STAR", "stateless"),
        ("STAR_THRESHOLD", "7"),
        ("STAR_WIRE", "paper"),
        ("STAR_PARTITION", "10.1.0.0/16,fd01::/32"),
        ("STAR_KEY", "/tmp/star.key"),
        ("ONERMA_WINDOW", "increase=0.5,beta=0.8,least=0.01,most=64,local_target=1000ns,rtt=50000ns"),
        ("CONFIG", "/tmp/x.toml"),
    ];
    assert_eq!(given.len(), KEYS.len(), "a key without a sample");
    for (key, (name, value)) in KEYS.iter().zip(given) {
        assert_eq!(key.name, name);
        let settings = env(&[(&key.variable(), value)]).unwrap();
        assert_eq!(key.show(&settings), value, "{name}");
        assert_ne!(settings, Settings::default(), "{name}: the sample must differ from the default");
        if name != "CONFIG" {
            let same = file(&format!("{} = {value:?}", key.toml_name())).unwrap();
            assert_eq!(key.show(&same), value, "{name}");
        }
    }
}

#[test]
fn environment_wins_over_the_file() {
    let vars = [("STARVERBS_MTU".to_owned(), "512".to_owned())];
    let settings = Settings::from_sources(vars.into_iter(), Some("mtu = 2048\nport = 5000")).unwrap();
    assert_eq!((settings.mtu, settings.port), (Some(512), 5000));
}

#[test]
fn an_empty_variable_is_not_set() {
    assert_eq!(env(&[("STARVERBS_MTU", "")]).unwrap(), Settings::default());
}

#[test]
fn toml_may_use_its_own_types() {
    let settings =
        file("gso = false\naddrs = [\"127.0.0.1\", \"::1\"]\nfault = { loss = \"1%\", seed = 3 }").unwrap();
    assert!(!settings.gso);
    assert_eq!(settings.addrs.map(|a| a.len()), Some(2));
    assert_eq!((settings.fault.loss, settings.fault.seed), (0.01, 3));
}

#[test]
fn unknown_keys_name_themselves_and_a_neighbour() {
    let text = message(env(&[("STARVERBS_FUALT", "loss=1%")]));
    assert!(text.contains("STARVERBS_FUALT") && text.contains("did you mean STARVERBS_FAULT?"), "{text}");
    let text = message(file("prot = 1"));
    assert!(text.contains("prot (in TOML)") && text.contains("did you mean port?"), "{text}");
    let text = message(env(&[("STARVERBS_COLOUR", "red")]));
    assert!(text.contains("STARVERBS_COLOUR") && !text.contains("did you mean"), "{text}");
    // Keys in the file are lower case: there is one way to write each.
    assert!(message(file("MTU = 1024")).contains("did you mean mtu?"));
}

#[test]
fn errors_name_key_value_and_what_is_allowed() {
    let bad = [
        ("STARVERBS_MTU", "1500"),
        ("STARVERBS_PORT", "0"),
        ("STARVERBS_PORT", "70000"),
        ("STARVERBS_ADDRS", "127.0.0.1,nowhere"),
        ("STARVERBS_ADDRS", "::1,::1"),
        ("STARVERBS_LINK", "shm"),
        ("STARVERBS_RCVBUF", "4X"),
        ("STARVERBS_RCVBUF", "0"),
        ("STARVERBS_RCVBUF", "9999999999999999999G"),
        ("STARVERBS_GSO", "yes"),
        ("STARVERBS_LOG", "loud"),
        ("STARVERBS_WINDOW", "-1"),
        ("STARVERBS_DELAY_TARGET", "50"),
        ("STARVERBS_DELAY_TARGET", "0us"),
        ("STARVERBS_MEMORY", "0"),
        ("STARVERBS_MEMORY", "300000G"),
        ("STARVERBS_FAULT", "loss"),
        ("STARVERBS_FAULT", "loss=101%"),
        ("STARVERBS_FAULT", "loss=-1%"),
        ("STARVERBS_FAULT", "loss=nan"),
        ("STARVERBS_FAULT", "los=1%"),
        ("STARVERBS_FAULT", "loss=1%,loss=2%"),
        ("STARVERBS_FAULT", "delay=5"),
        ("STARVERBS_FAULT", "delay=2000s"),
        ("STARVERBS_FAULT", "seed=x"),
        ("STARVERBS_QPC_CACHE", "0"),
        ("STARVERBS_QPC_CACHE", "many"),
        ("STARVERBS_QPC_CACHE", "miss=500ns"),
        ("STARVERBS_QPC_CACHE", "300,500ns"),
        ("STARVERBS_QPC_CACHE", "300,miss=500"),
        ("STARVERBS_QPC_CACHE", "300,miss=2ms"),
        ("STARVERBS_QPC_CACHE", "300,policy=lifo"),
        ("STARVERBS_QPC_CACHE", "300,entries=300"),
        ("STARVERBS_QPC_CACHE", "300,hit=1ns"),
        ("STARVERBS_STAR", "on"),
        ("STARVERBS_STAR_THRESHOLD", "-1"),
        ("STARVERBS_STAR_PARTITION", "10.1.0.0"),
        ("STARVERBS_STAR_PARTITION", "10.1.0.0/33"),
        ("STARVERBS_STAR_PARTITION", "fd01::/129"),
        ("STARVERBS_STAR_PARTITION", "10.1.0.0/16,"),
        ("STARVERBS_ONERMA_WINDOW", "0.25"),
        ("STARVERBS_ONERMA_WINDOW", "alpha=1"),
        ("STARVERBS_ONERMA_WINDOW", "beta=0"),
        ("STARVERBS_ONERMA_WINDOW", "beta=nan"),
        ("STARVERBS_ONERMA_WINDOW", "increase=1.5"),
        ("STARVERBS_ONERMA_WINDOW", "beta=0.8,beta=0.7"),
        ("STARVERBS_ONERMA_WINDOW", "least=9,most=8"),
        ("STARVERBS_ONERMA_WINDOW", "rtt=50"),
        ("STARVERBS_ONERMA_WINDOW", "rtt=2s"),
    ];
    for (key, value) in bad {
        let text = message(env(&[(key, value)]));
        assert!(text.starts_with(&format!("{key}: {value:?}: ")) && text.contains("allowed: "), "{text}");
    }
}

#[test]
fn a_secret_key_is_never_shown() {
    let text = message(env(&[("STARVERBS_STAR_KEY", "0123456789abcdef")]));
    assert!(text.starts_with("STARVERBS_STAR_KEY: \"...\": neither 64 hexadecimal digits"), "{text}");
    let settings = env(&[("STARVERBS_STAR_KEY", &"5a".repeat(32))]).unwrap();
    let shown: Vec<String> = KEYS.iter().map(|key| key.show(&settings)).collect();
    assert!(shown.contains(&"hidden".to_owned()) && !format!("{settings:?}{shown:?}").contains("5a5a"));
}

#[test]
fn faults_in_any_order_and_unit() {
    let spec = FaultSpec::parse("seed=7, delay=1.5ms,reorder=0.1%,loss=0.05,corrupt=1e-3,jitter=20us,dup=0")
        .unwrap();
    let expected = FaultSpec {
        loss: 0.05,
        reorder: 0.001,
        duplicate: 0.0,
        corrupt: 0.001,
        delay: Duration::from_micros(1500),
        jitter: Duration::from_micros(20),
        seed: 7,
    };
    assert_eq!(spec, expected);
    assert_eq!(FaultSpec::parse(&spec.to_string()), Ok(spec));
    assert!(!FaultSpec::parse("off").unwrap().is_active());
    assert!(!FaultSpec::parse("seed=9").unwrap().is_active());
    assert!(FaultSpec::parse("jitter=1ns").unwrap().is_active());
}

#[test]
fn a_context_cache_needs_only_its_entries() {
    let spec = |text: &str| QpcSpec::parse(text).unwrap().unwrap();
    let ns = Duration::from_nanos;
    let all = QpcSpec { entries: 300, miss: ns(500), fetch: ns(500), policy: QpcPolicy::LatencyHiding };
    assert_eq!(spec("300"), all);
    assert_eq!(spec("300,miss=2us"), QpcSpec { miss: ns(2000), fetch: ns(2000), ..all });
    let other = QpcSpec { fetch: ns(0), policy: QpcPolicy::NonBlocking, ..all };
    assert_eq!(spec("300, policy=non-blocking, fetch=0"), other);
    assert_eq!(QpcSpec::parse("off"), Ok(None));
    let settings = file("qpc_cache = { entries = 300, fetch = \"0ns\", policy = \"non-blocking\" }").unwrap();
    assert_eq!(settings.qpc_cache, Some(other));
}

#[test]
fn capture_file_carries_the_pid() {
    let settings = env(&[("STARVERBS_PCAP", "/tmp/%p/x-%p.pcap")]).unwrap();
    assert_eq!(settings.pcap_path(42).unwrap(), Path::new("/tmp/42/x-42.pcap"));
}

/// Loads with a file system that holds just `files`.
fn load(vars: &[(&str, &str)], files: &[(&str, &str)]) -> Result<Settings, SettingsError> {
    let files: HashMap<_, _> =
        files.iter().map(|(path, text)| (Path::new(*path), (*text).to_owned())).collect();
    let vars = vars.iter().map(|(k, v)| (OsString::from(k), OsString::from(v)));
    source::load(vars, |path| Ok(files.get(path).map(|toml| source::Text { toml: toml.clone(), open: true })))
}

#[test]
fn files_are_looked_for_in_order() {
    let system = ("/etc/starverbs.toml", "mtu = 256");
    let personal = ("/home/me/.config/starverbs/starverbs.toml", "mtu = 512");
    let named = ("/tmp/mine.toml", "mtu = 1024");
    let home = ("HOME", "/home/me");
    assert_eq!(load(&[home], &[system]).unwrap().mtu, Some(256));
    assert_eq!(load(&[home], &[system, personal]).unwrap().mtu, Some(512));
    let config = ("STARVERBS_CONFIG", "/tmp/mine.toml");
    let settings = load(&[home, config], &[system, personal, named]).unwrap();
    assert_eq!((settings.mtu, settings.config.as_deref()), (Some(1024), Some(Path::new("/tmp/mine.toml"))));
    assert!(message(load(&[config], &[system])).contains("/tmp/mine.toml"));
}

#[test]
fn errors_of_broken_files_name_the_place() {
    assert!(message(file("mtu = = 3")).contains("not TOML"));
    assert!(message(file("config = \"x\"")).contains("only be set in the environment"));
    let text = message(load(&[], &[("/etc/starverbs.toml", "mtu = 9")]));
    assert!(text.starts_with("mtu (in /etc/starverbs.toml): \"9\": "), "{text}");
}

/// Neither a mistake in its line nor the file's mode gives the key away.
#[test]
fn a_key_in_a_file_is_kept_from_others() {
    let key = "5a".repeat(32);
    for text in
        [format!("mtu = 1024\nstar_key = {key}"), format!("star_key = \"{key}"), format!("star_key {key}")]
    {
        let text = message(file(&text));
        assert!(text.contains("not TOML: line ") && !text.contains("5a5a"), "{text}");
    }
    let good = format!("star_key = \"{key}\"");
    assert!(file(&good).is_ok());
    let refused = message(load(&[], &[("/etc/starverbs.toml", &good)]));
    assert!(refused.contains("/etc/starverbs.toml") && refused.contains("chmod 600"), "{refused}");
    assert!(load(&[], &[("/etc/starverbs.toml", "star_key = \"/etc/star.key\"")]).is_ok());
}

#[cfg(unix)]
#[test]
fn bytes_that_are_no_text_are_refused_without_panic() {
    use std::os::unix::ffi::OsStringExt;
    let vars = [(OsString::from("STARVERBS_PCAP"), OsString::from_vec(vec![0xff]))];
    assert!(message(source::load(vars.into_iter(), |_| Ok(None))).contains("STARVERBS_PCAP"));
}

/// docs/settings.md carries the table of this crate, no other.
#[test]
fn documentation_has_this_table() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/settings.md");
    let text = std::fs::read_to_string(&file).unwrap();
    let (before, rest) = text.split_once("<!-- table").unwrap();
    let (comment, rest) = rest.split_once("-->\n").unwrap();
    let (_, after) = rest.split_once("<!-- end").unwrap();
    let wanted = format!("{before}<!-- table{comment}-->\n\n{}\n<!-- end{after}", markdown());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&file, &wanted).unwrap();
    } else {
        assert_eq!(text, wanted, "run with UPDATE_DOCS=1 to rewrite docs/settings.md");
    }
}

#[test]
fn a_device_that_there_is_not_is_refused() {
    assert_eq!(env(&[("STARVERBS_DEVICE", "soft")]).unwrap().device, DeviceChoice::Soft);
    for wrong in ["board:", "board", "fpga", "/run/b.sock"] {
        assert!(env(&[("STARVERBS_DEVICE", wrong)]).is_err(), "{wrong}");
    }
}
