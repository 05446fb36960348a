//! Environments of launchers, and the launch parameters read from them.

use super::*;

const SECRET: &str = "a secret of the user's";
const ID: &str = "doorbell:10.0.0.1:4000:000102030405060708090a0b0c0d0e0f";

fn read(variables: &[(&str, &str)]) -> Result<Launch, BootstrapError> {
    Launch::from_variables(|name| {
        let found = variables.iter().find(|(variable, _)| *variable == name);
        found.map(|(_, value)| (*value).to_owned())
    })
}

const TORCHRUN: &[(&str, &str)] = &[
    ("RANK", "3"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "1"),
    ("MASTER_ADDR", "head"),
    ("MASTER_PORT", "29500"),
    ("TORCHELASTIC_RUN_ID", "none"),
    ("TORCHELASTIC_RESTART_COUNT", "0"),
    ("DOORBELL_SECRET", SECRET),
];
/// As Open MPI 4.1 sets them.
const MPIRUN: &[(&str, &str)] = &[
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    (
        "OMPI_MCA_orte_precondition_transports",
        "d5161dede2eeee19-622064dcf66c8a6c",
    ),
    ("OMPI_MCA_ess_base_jobid", "1494024193"),
    ("PMIX_NAMESPACE", "1494024193"),
];
const SRUN: &[(&str, &str)] = &[
    ("SLURM_PROCID", "5"),
    ("SLURM_NTASKS", "9"),
    ("SLURM_STEP_NUM_TASKS", "6"),
    ("SLURM_LOCALID", "2"),
    ("SLURM_STEP_NODELIST", "gpu[07-09,12],head"),
    ("SLURM_JOB_ID", "4711"),
    ("SLURM_STEP_ID", "0"),
    ("DOORBELL_SECRET", SECRET),
];

/// `base` with some variables replaced.
fn with<'a>(base: &[(&'a str, &'a str)], more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    [more, base].concat()
}

fn derived(launch: Launch) -> (String, u16, [u8; 16]) {
    match launch.rendezvous {
        RendezvousPoint::Derived { host, port, secret } => (host, port, *secret.bytes()),
        RendezvousPoint::Id(id) => panic!("{id}"),
    }
}

fn id(launch: Launch) -> String {
    match launch.rendezvous {
        RendezvousPoint::Id(id) => id.to_string(),
        derived => panic!("{derived:?}"),
    }
}

#[test]
fn every_launcher_is_recognised() {
    let ours = [("DOORBELL_RANK", "0"), ("DOORBELL_RANKS", "4"), ("DOORBELL_ID", ID)];
    let launch = read(&ours).unwrap();
    assert_eq!(
        (launch.launcher, launch.rank, launch.ranks, launch.local_rank),
        (Launcher::Doorbell, Rank(0), 4, None)
    );
    assert_eq!(id(launch), ID);

    let launch = read(TORCHRUN).unwrap();
    assert_eq!(
        (launch.launcher, launch.rank, launch.ranks, launch.local_rank),
        (Launcher::Torchrun, Rank(3), 8, Some(1))
    );
    let (host, port, _) = derived(launch);
    assert_eq!((host.as_str(), port), ("head", 29501));

    let launch = read(MPIRUN).unwrap();
    assert_eq!(
        (launch.launcher, launch.rank, launch.ranks, launch.local_rank),
        (Launcher::OpenMpi, Rank(1), 2, Some(1))
    );
    let (host, port, _) = derived(launch);
    assert_eq!(host, "127.0.0.1");
    assert!((10240..28672).contains(&port) && port % 8 == 0, "{port}");

    let launch = read(SRUN).unwrap();
    assert_eq!(
        (launch.launcher, launch.rank, launch.ranks, launch.local_rank),
        (Launcher::Slurm, Rank(5), 6, Some(2))
    );
    let (host, port, _) = derived(launch);
    assert_eq!(host, "gpu07");
    assert!((10240..28672).contains(&port) && port % 8 == 0, "{port}");
}

#[test]
fn the_inner_launcher_wins_and_an_id_names_the_rendezvous() {
    assert_eq!(read(&with(SRUN, TORCHRUN)).unwrap().launcher, Launcher::Torchrun);
    assert_eq!(read(&with(SRUN, MPIRUN)).unwrap().launcher, Launcher::OpenMpi);
    assert_eq!(
        read(&with(MPIRUN, &[("RANK", "9")])).unwrap().launcher,
        Launcher::OpenMpi,
        "that is some other RANK"
    );
    for base in [TORCHRUN, MPIRUN, SRUN] {
        let launch = read(&with(base, &[("DOORBELL_ID", ID)])).unwrap();
        assert_eq!(id(launch), ID);
    }
    let spread = with(
        MPIRUN,
        &[
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
            ("MASTER_ADDR", "head"),
            ("MASTER_PORT", "7000"),
        ],
    );
    let (host, port, _) = derived(read(&spread).unwrap());
    assert_eq!((host.as_str(), port), ("head", 7001));
}

#[test]
fn ranks_of_one_host_meet_on_loopback() {
    for (base, one_host) in [
        (TORCHRUN, ("LOCAL_WORLD_SIZE", "8")),
        (SRUN, ("SLURM_STEP_NUM_NODES", "1")),
    ] {
        let (host, port, _) = derived(read(&with(base, &[one_host])).unwrap());
        assert_eq!(host, "127.0.0.1");
        assert_eq!(port, derived(read(base).unwrap()).1);
    }
    let (host, ..) = derived(read(&with(TORCHRUN, &[("LOCAL_WORLD_SIZE", "4")])).unwrap());
    assert_eq!(host, "head");
}

#[test]
fn secrets_are_equal_within_a_job_only() {
    let secret = |base: &[(&str, &str)], more: &[(&str, &str)]| derived(read(&with(base, more)).unwrap()).2;
    for (base, rank, job) in [
        (TORCHRUN, "RANK", "TORCHELASTIC_RESTART_COUNT"),
        (MPIRUN, "OMPI_COMM_WORLD_RANK", "OMPI_MCA_orte_precondition_transports"),
        (SRUN, "SLURM_PROCID", "SLURM_JOB_ID"),
    ] {
        assert_eq!(secret(base, &[(rank, "0")]), secret(base, &[]));
        assert_ne!(secret(base, &[(job, "77")]), secret(base, &[]));
        assert_ne!(
            secret(base, &[("DOORBELL_SECRET", "another one of them")]),
            secret(base, &[])
        );
    }
}

#[test]
fn ports_do_not_depend_on_the_secret() {
    let port = |secret: &str| derived(read(&with(SRUN, &[("DOORBELL_SECRET", secret)])).unwrap()).1;
    let ports: Vec<_> = (0..64)
        .map(|number| port(&format!("secret number {number:03}")))
        .collect();
    assert!(ports.iter().all(|one| *one == ports[0]), "{ports:?}");
}

#[test]
fn a_secret_is_that_of_the_user_a_file_the_launcher_or_home() {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().to_str().unwrap();
    let file = folder.path().join(".config/doorbell/secret");
    let unset = ("DOORBELL_SECRET", "");
    let secret = |more: &[(&str, &str)]| read(&with(SRUN, more)).map(|launch| derived(launch).2);
    let made = secret(&[unset, ("HOME", home)]).unwrap();
    let text = std::fs::read_to_string(&file).unwrap();
    assert_eq!(secret(&[("DOORBELL_SECRET", text.trim())]).unwrap(), made);
    let file = file.to_str().unwrap();
    assert_eq!(secret(&[unset, ("DOORBELL_SECRET_FILE", file)]).unwrap(), made);
    let elsewhere = ("XDG_CONFIG_HOME", home);
    assert_ne!(secret(&[unset, elsewhere, ("HOME", "/nowhere")]).unwrap(), made);
    let key = read(&with(MPIRUN, &[("HOME", "/nowhere")])).map(derived);
    assert!(key.is_ok(), "{key:?}");
    for (more, expected) in [
        (&[unset][..], "HOME is not set; set DOORBELL_SECRET"),
        (
            &[unset, ("HOME", "/proc")],
            "no secret authenticates the ranks: /proc/.config/doorbell/secret",
        ),
        (&[unset, ("DOORBELL_SECRET_FILE", "/nowhere")], "/nowhere: No such file"),
        (
            &[("DOORBELL_SECRET", "too short")],
            "it should have at least 16 characters",
        ),
    ] {
        let said = secret(more).unwrap_err().to_string();
        assert!(said.contains(expected) && !said.contains("too short"), "{said}");
    }
}

#[test]
fn errors_name_the_variable() {
    let ours = &[("DOORBELL_RANK", "0"), ("DOORBELL_RANKS", "4"), ("DOORBELL_ID", ID)];
    for (variables, expected) in [
        (vec![], "no launcher"),
        (vec![("RANK", "0")], "no launcher"),
        (with(ours, &[("DOORBELL_RANK", "")]), "no launcher"),
        (with(ours, &[("DOORBELL_RANK", "x")]), "DOORBELL_RANK is \"x\""),
        (with(ours, &[("DOORBELL_RANK", "-1")]), "DOORBELL_RANK is \"-1\""),
        (with(ours, &[("DOORBELL_RANKS", "")]), "DOORBELL_RANKS is \"\""),
        (with(ours, &[("DOORBELL_RANK", "4")]), "rank 4 of 4"),
        (with(ours, &[("DOORBELL_ID", "x")]), "DOORBELL_ID: this is no unique id"),
        (with(ours, &[("DOORBELL_ID", "")]), "DOORBELL_ID is \"\""),
        (with(TORCHRUN, &[("MASTER_ADDR", "")]), "MASTER_ADDR is \"\""),
        (with(TORCHRUN, &[("MASTER_PORT", "99999")]), "MASTER_PORT is \"99999\""),
        (with(TORCHRUN, &[("MASTER_PORT", "65535")]), "MASTER_PORT is \"65535\""),
        (
            with(MPIRUN, &[("OMPI_COMM_WORLD_LOCAL_SIZE", "1")]),
            "MASTER_ADDR is \"\": the ranks run on several hosts",
        ),
        (
            with(SRUN, &[("SLURM_STEP_NODELIST", "a[1")]),
            "SLURM_STEP_NODELIST is \"a[1\"",
        ),
    ] {
        let said = read(&variables).unwrap_err().to_string();
        assert!(said.contains(expected), "{variables:?}: {said}");
    }
}

#[test]
fn the_first_host_of_a_list_is_found() {
    for (list, first) in [
        ("a", Some("a")),
        ("a,b", Some("a")),
        ("a-1.example", Some("a-1.example")),
        ("a[1-3]", Some("a1")),
        ("a[07,09]", Some("a07")),
        ("a[2]b[4-5]-c,d", Some("a2b4-c")),
        ("", None),
        (",a", None),
        ("a[1", None),
        ("a b", None),
        ("a]", None),
    ] {
        assert_eq!(first_host(list).as_deref(), first, "{list}");
    }
}

#[test]
fn a_child_reads_the_variables_of_its_parent() {
    let given = Launch::variables(&ID.parse().unwrap(), Rank(2), 3);
    let launch = Launch::from_variables(|name| {
        given
            .iter()
            .find(|(variable, _)| *variable == name)
            .map(|(_, value)| value.clone())
    });
    let launch = launch.unwrap();
    assert_eq!(
        (launch.launcher, launch.rank, launch.ranks, launch.local_rank),
        (Launcher::Doorbell, Rank(2), 3, Some(2))
    );
    assert_eq!(id(launch), ID);
}
