//! Launch scripts: the arguments that bash would pass to the program, unknown values, and the
//! number of ranks that the launchers start.

use std::fs;
use std::path::Path;

use recipe::import::{ConfigFormat, Imported, KeyStatus, command_of_script, import, import_script};

use crate::import::config_value;

/// A complete model, and a batch of 2 x 4.
const MODEL: &str = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 \
                     --max-position-embeddings 32 --vocab-size 100 --data-path d \
                     --train-iters 50 --lr 1e-3 --micro-batch-size 2 --gas 4";

fn read_in(folder: &Path, source: ConfigFormat, script: &str, world: Option<u64>) -> Imported {
    let path = folder.join("run.sh");
    fs::write(&path, script).unwrap();
    import(source, &[path.to_str().unwrap().to_owned()], world).unwrap()
}

fn read(script: &str) -> Imported {
    let folder = tempfile::tempdir().unwrap();
    read_in(folder.path(), ConfigFormat::Megatron, script, None)
}

fn fate(imported: &Imported, key: &str) -> (KeyStatus, String) {
    let found = imported.fates.iter().find(|fate| fate.key == key);
    let found = found.unwrap_or_else(|| panic!("no fate of {key} in\n{imported}"));
    (found.fate, found.text.clone())
}

fn refused(imported: &Imported) -> Vec<&str> {
    let all = imported.fates.iter().filter(|key| key.fate == KeyStatus::Refused);
    all.map(|key| key.key.as_str()).collect()
}

fn words(script: &str) -> Vec<String> {
    command_of_script(script).unwrap().words
}

/// `$(( ))` was computed from left to right.
#[test]
fn arithmetic_has_the_precedence_of_c() {
    let run = read(&format!(
        "W=10\nS=5\nE=18\nN=$((W + S * E))\nD=$(( N > 50 ? N % 7 : 2 ** 3 ))\n\
         torchrun pretrain_gpt.py {MODEL} --train-iters $N --lr-warmup-iters $W \
         --lr-decay-iters $(( (D + 1) * 4 ))\n"
    ));
    assert_eq!(config_value(&run, "run.budget"), "{ steps = 100 }");
    // 100 % 7 = 2
    assert_eq!(config_value(&run, "optim.lr.decay"), "{ steps = 12 }");
    assert_eq!(refused(&run), [""; 0], "{run}");
}

/// `&&` and `||` were read as `;`, and of `[[ a && b ]]` only the first half.
#[test]
fn conditions_hold_in_lists_and_in_brackets() {
    let run = read(&format!(
        "FP16=0\nBF16=1\nX=''\n[ \"$FP16\" = 1 ] && X=\"$X --fp16\"\n[ \"$FP16\" = 1 ] || L=3e-4\n\
         if [[ $BF16 == 1 && $FP16 == 1 ]]; then C=0.5; else C=1.5; fi\n\
         if [ $BF16 = 0 ] || [ $FP16 = 0 ]; then D=0.2; else D=0.3; fi\n\
         case $BF16-$FP16 in 1-*) E='--bf16';; *) E='--fp16';; esac\n\
         torchrun pretrain_gpt.py {MODEL} --lr $L --clip-grad $C --weight-decay $D $X $E\n"
    ));
    for (key, expected) in [
        ("precision.dtype", "\"bf16\""),
        ("optim.lr.peak", "0.0003"),
        ("optim.clip", "1.5"),
        ("optim.weight_decay", "0.2"),
    ] {
        assert_eq!(config_value(&run, key), expected, "{key} in\n{run}");
    }
    assert_eq!(refused(&run), [""; 0], "{run}");
}

/// A default that is a variable was read as text, and `readonly X=1` was ignored.
#[test]
fn defaults_and_declarations_have_values() {
    let run = read(&format!(
        "D=20\nW=${{W:-${{NO:-$D}}}}\nreadonly C=0.5\nlet G=2*4\ntypeset Y=90\n\
         torchrun pretrain_gpt.py {MODEL} --lr-warmup-iters $W --clip-grad $C \
         --lr-decay-iters $Y --global-batch-size $G --weight-decay ${{WD:-0.3}}\n"
    ));
    for (key, expected) in [
        ("optim.lr.warmup", "{ steps = 20 }"),
        ("optim.lr.decay", "{ steps = 90 }"),
        ("optim.clip", "0.5"),
        ("optim.weight_decay", "0.3"),
        ("batch.global", "8"),
    ] {
        assert_eq!(config_value(&run, key), expected, "{key} in\n{run}");
    }
    let note = "not set in the script, so that their defaults are used: NO, WD";
    assert!(run.notes.iter().any(|it| it.contains(note)), "{run}");
}

/// A comment or a space in the middle of a command ends it, and the flags after it were not named.
#[test]
fn flags_after_a_broken_line_continuation_are_named() {
    let script = |end: &str| {
        format!("torchrun pretrain_gpt.py {MODEL} \\\n  {end}\n  --clip-grad 0.5 \\\n  --bf16\n")
    };
    for (end, cause) in [
        ("# --lr-decay-style cosine \\", "line 2 is or has a comment"),
        ("--lr-decay-style cosine # as before \\", "line 2 is or has a comment"),
        ("--lr-decay-style cosine \\ ", "line 2 has a space behind its '\\'"),
        ("--lr-decay-style cosine", "line 2 does not end in '\\'"),
    ] {
        let run = read(&script(end));
        let (status, text) = fate(&run, "--clip-grad 0.5 --bf16");
        assert_eq!(status, KeyStatus::Refused);
        assert!(
            text.contains("line 3: never reaches the program") && text.contains(cause),
            "{text}"
        );
        assert_eq!(config_value(&run, "precision.dtype"), "absent");
        assert!(!run.is_whole());
    }
    let run = read(&script("--lr-decay-style cosine \\").replace('\n', "\r\n"));
    assert!(fate(&run, "line ends").1.contains("DOS line ends"), "{run}");
    assert_eq!(fate(&run, "--clip-grad 0.5").0, KeyStatus::Refused);
    // The correct form.
    let whole = read(&script("--lr-decay-style cosine \\"));
    assert_eq!(refused(&whole), [""; 0], "{whole}");
}

/// Flags that depend on an unknown condition are listed, and the result is uncertain.
#[test]
fn unknown_conditions_are_listed_with_the_affected_flags() {
    let script = |condition: &str, then: &str| {
        format!(
            "X='--seed 1'\nif {condition}; then\n  {then}\nfi\n\
             torchrun pretrain_gpt.py {MODEL} $X\n"
        )
    };
    for condition in
        ["[ -f /some/where ]", "[[ -n $OUTSIDE ]]", "grep -q x log", "[ $(hostname) = node1 ]"]
    {
        let run = read(&script(condition, "X=\"$X --bf16\""));
        assert_eq!(refused(&run), ["condition in line 2"], "{condition}: {run}");
        let text = fate(&run, "condition in line 2").1;
        assert!(text.contains("on it depend --bf16"), "{text}");
        // No flag depends on it.
        let run = read(&script(condition, "echo there; mkdir -p out"));
        assert_eq!(refused(&run), [""; 0], "{condition}: {run}");
        let run = read(&script(condition, "Y=1"));
        assert_eq!(refused(&run), [""; 0], "{condition}: {run}");
    }
    // The run existed, so the command that ends the script did not run.
    let run = read(&script("[ ! -d corpus ]", "echo no corpus; exit 1"));
    assert_eq!(refused(&run), [""; 0], "{run}");
    assert!(run.notes.iter().any(|it| it.contains("otherwise nothing is trained")), "{run}");
    // A loop over the lines of a file has an unknown number of rounds.
    let run = read(&format!(
        "N=0\nwhile read -r line; do N=$((N + 1)); done < hosts\n\
         torchrun pretrain_gpt.py {MODEL} --seed $N\n"
    ));
    assert_eq!(refused(&run), ["--seed"], "{run}");
}

#[test]
fn values_from_outside_keep_their_names() {
    let run = read(&format!(
        "D=$(date +%F)\nN=$(nproc)\ntorchrun pretrain_gpt.py {MODEL} --save out/$D --seed $N \
         --log-interval $(( N * 2 )) --data-path *_document --load $HERE $EXTRA\n"
    ));
    for key in ["--save", "--seed", "--log-interval", "--data-path", "--load", "${EXTRA}"] {
        assert_eq!(fate(&run, key).0, KeyStatus::Refused, "{key} in\n{run}");
    }
    let value = |key: &str| run.fates.iter().find(|it| it.key == key).map(|it| &*it.value);
    assert_eq!(value("--save"), Some("out/${date_+%F}"));
    assert_eq!(value("--data-path"), Some("${*_document}"));
}

/// The last command that ran Python was used, whatever it did.
#[test]
fn the_training_program_is_found() {
    let train = format!("torchrun pretrain_gpt.py {MODEL}");
    let before = "python tools/preprocess_data.py --input x\ncp train.py old/\n";
    let after = "python tools/convert.py --lr 5\npython eval_model.py --lr 7\necho train.py\n";
    for command in [
        train.clone(),
        format!("nohup env A=1 {train} > log 2>&1 &"),
        format!("time {train} 2>&1 | tee log"),
        format!("srun bash -c '{train}'"),
        format!("singularity exec --nv image.sif {train}"),
        format!("docker run --rm image {train}"),
        format!("CMD='{train}'\neval $CMD"),
        format!("run() {{ \"$@\"; }}\nrun {train}"),
        format!("ARGS=({MODEL})\nexec torchrun pretrain_gpt.py \"${{ARGS[@]}}\""),
        format!("ARGS=$(cat <<EOF\n{MODEL}\nEOF\n)\npython -m pretrain_gpt $ARGS"),
    ] {
        let exec = command.contains("exec torchrun");
        let script = format!("{before}{command}\n{}", if exec { "" } else { after });
        let run = read(&script);
        assert_eq!(config_value(&run, "optim.lr.peak"), "0.001", "{script}\n{run}");
        assert!(run.notes.iter().all(|it| !it.contains("commands train")), "{run}");
    }
    let two = read(&format!("{train} --lr 5\n{train}\n"));
    let note = "2 commands train (pretrain_gpt.py in line 1, pretrain_gpt.py in line 2)";
    assert!(two.notes.iter().any(|it| it.contains(note)), "{two}");
}

/// The ranks of `srun`, `mpirun` and `accelerate` were not read.
#[test]
fn ranks_are_those_of_the_launcher() {
    let batch = |launcher: &str| {
        let run = read(&format!("{launcher} pretrain_gpt.py {MODEL}\n"));
        assert_eq!(refused(&run), [""; 0], "{launcher}: {run}");
        config_value(&run, "batch.global")
    };
    for (launcher, ranks) in [
        ("srun --nodes=2 --ntasks-per-node=8 python", 16),
        ("srun -N2 -n 16 python", 16),
        ("srun --ntasks 4 python", 4),
        ("mpirun -np 16 python", 16),
        ("mpiexec --n 4 -x PATH python", 4),
        ("torchrun --nproc-per-node 4 --nnodes=2", 8),
        ("torchrun --nnodes 2:2 --nproc_per_node=4 --rdzv_id 7", 8),
        ("torchrun --standalone --nproc_per_node 4", 4),
        ("srun --nodes=2 --ntasks-per-node=1 torchrun --nnodes 2 --nproc_per_node 4", 8),
        ("python -m torch.distributed.launch --nproc_per_node 4", 4),
        ("python3 -m torch.distributed.run --nproc_per_node 4 --nnodes 4", 16),
        ("deepspeed --num_nodes 2 --num_gpus 4", 8),
        ("deepspeed --include node1:0,1@node2:0,1", 4),
        ("accelerate launch --num_processes 8 --num_machines 2", 8),
    ] {
        assert_eq!(batch(launcher), (8 * ranks).to_string(), "{launcher}");
    }
    let run = read(&format!("mpirun -np 4 --bind-to none python pretrain_gpt.py {MODEL}\n"));
    assert_eq!(fate(&run, "--bind-to").0, KeyStatus::Implied);
    let unfixed = ["torchrun --nnodes 1:4 --nproc_per_node 8", "torchrun --nproc_per_node gpu"];
    for launcher in unfixed {
        let script = format!("{launcher} pretrain_gpt.py {MODEL}\n");
        let run = read(&script);
        assert!(fate(&run, refused(&run)[0]).1.contains("not fixed (hint: --ranks N)"), "{run}");
        let folder = tempfile::tempdir().unwrap();
        let run = read_in(folder.path(), ConfigFormat::Megatron, &script, Some(4));
        assert_eq!(
            (refused(&run), config_value(&run, "batch.global")),
            (vec![], "32".to_owned()),
            "{run}"
        );
    }
}

#[test]
fn ranks_of_hostfiles_and_slurm_headers_are_read() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("hosts"), "# comment\nnode1 slots=8\nnode2 slots=4\n").unwrap();
    let read_here = |launcher: &str| {
        let script = format!("{launcher} pretrain_gpt.py {MODEL}\n");
        read_in(folder.path(), ConfigFormat::Megatron, &script, None)
    };
    for (launcher, ranks) in [
        ("deepspeed --hostfile hosts", 12),
        ("deepspeed --hostfile=hosts --num_gpus 2", 4),
        ("deepspeed --hostfile hosts --include node2", 4),
        ("deepspeed --hostfile hosts --num_nodes 1 --num_gpus 8", 8),
    ] {
        let run = read_here(launcher);
        assert_eq!(
            config_value(&run, "batch.global"),
            (8 * ranks).to_string(),
            "{launcher}: {run}"
        );
    }
    let run = read_here("deepspeed --hostfile absent");
    assert_eq!(refused(&run), ["--hostfile"], "{run}");

    let slurm = |command: &str| {
        let head = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n#SBATCH -J gpt\n\
                    #SBATCH --gres=gpu:4\n";
        read(&format!("{head}{command} pretrain_gpt.py {MODEL}\n"))
    };
    for (command, ranks) in [
        ("srun python", 8),
        ("srun --ntasks 6 python", 6),
        ("srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 2", 4),
    ] {
        let run = slurm(command);
        assert_eq!(config_value(&run, "batch.global"), (8 * ranks).to_string(), "{command}: {run}");
        assert_eq!(refused(&run), [""; 0], "{run}");
        assert_eq!(fate(&run, "#SBATCH --J").0, KeyStatus::Implied);
    }
}

/// A count from outside, a range, a file that is not one of hosts, or one with a host twice.
#[test]
fn numbers_of_ranks_that_are_not_known_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("openmpi"), "node1 slots=8 max_slots=8\n").unwrap();
    fs::write(folder.path().join("mpich"), "node1:8\nnode2:8\n").unwrap();
    fs::write(folder.path().join("twice"), "node1 slots=8\nnode1 slots=8\n").unwrap();
    let slurm = |nodes: &str| {
        format!("#!/bin/bash\n#SBATCH --nodes={nodes}\n#SBATCH --ntasks-per-node=4\nsrun python")
    };
    for (launcher, key) in [
        ("deepspeed --hostfile openmpi", "--hostfile"),
        ("deepspeed --hostfile mpich", "--hostfile"),
        ("deepspeed --hostfile twice", "--hostfile"),
        ("deepspeed --include node1@node2", "--include"),
        ("accelerate launch --config_file absent.yaml", "--config_file"),
        ("torchrun --nnodes 1:4 --nproc_per_node 8", "--nnodes"),
        ("mpirun -np all python", "-np"),
        ("srun --ntasks 4-8 python", "--ntasks"),
        (&slurm("1-4"), "#SBATCH --nodes"),
    ] {
        let script = format!("{launcher} pretrain_gpt.py {MODEL}\n");
        let run = read_in(folder.path(), ConfigFormat::Megatron, &script, None);
        assert_eq!(refused(&run), [key], "{launcher}: {run}");
    }
}

/// `accelerate launch` sets the precision of transformers' Trainer too.
#[test]
fn accelerate_sets_the_precision() {
    let folder = tempfile::tempdir().unwrap();
    let script = "accelerate launch --num_processes 8 --num_machines 2 --machine_rank 0 \
                  --mixed_precision bf16 run_clm.py --max_steps 10 --learning_rate 2e-5 \
                  --per_device_train_batch_size 2 --gradient_accumulation_steps 4\n";
    let run = read_in(folder.path(), ConfigFormat::Hf, script, None);
    assert_eq!(config_value(&run, "precision.dtype"), "\"bf16\"");
    assert_eq!(config_value(&run, "batch.global"), "64");
    for key in ["--num_machines", "--machine_rank"] {
        assert_eq!(fate(&run, key).0, KeyStatus::Implied);
    }
}

/// Texts that would take very long, overflow the stack, or confuse the parser.
#[test]
fn hostile_scripts_are_errors() {
    let nested = |open: &str, close: &str, count: usize| {
        format!("{}{}\ntorchrun train.py\n", open.repeat(count), close.repeat(count))
    };
    let mut hostile = vec![
        "while true; do :; done\n".to_owned(),
        "for ((;;)); do A=1; done\n".to_owned(),
        "f() { f; }\nf\ntorchrun train.py\n".to_owned(),
        "f() { f | f; }\nf\n".to_owned(),
        "A='eval $A'\neval $A\n".to_owned(),
        "A=x\nfor i in {1..64}; do A=$A$A; done\ntorchrun train.py $A\n".to_owned(),
        "99999999999999999999>x\n".to_owned(),
        "A=(x)\nfor ((i = 0; i < 9999; i++)); do A+=(\"${A[@]}\"); done\n".to_owned(),
        "for i in {1..9999}; do for j in {1..9999}; do B=$i; done; done\n".to_owned(),
    ];
    for count in [14, 40, 3000] {
        for (open, close) in [
            ("(", ")"),
            ("(", ""),
            ("$(", ")"),
            ("$(", ""),
            ("\"$(", ")\""),
            ("${A:-", "}"),
            ("${A:-", ""),
            ("x=${a[", "]}"),
            ("x[${a[", "]}]=1"),
            ("echo $((", "))"),
            ("echo $((1?", "))"),
            ("if ", "; fi"),
            ("case x in x) ", " esac"),
            ("cat <(", ")"),
            ("{ ", "; }"),
            ("[[ ( ", " ) ]]"),
            ("`", "`"),
            ("a{b,", "}"),
        ] {
            hostile.push(nested(open, close, count));
        }
    }
    for script in &hostile {
        // Either result is accepted.
        let found = command_of_script(script);
        let cause = found.err().unwrap_or_default();
        assert!(!cause.contains("not a script of bash"), "{script:.60}: {cause}");
    }
    for script in &hostile[..6] {
        assert!(command_of_script(script).is_err(), "{script}");
    }
}

/// Found by the fuzzer and in review: panics, stack overflows, and unbounded work.
#[test]
fn long_scripts_finish_quickly() {
    let names = (0..60).map(|at| format!("v{}=v{at}+v{at}\n", at + 1)).collect::<String>();
    let rounds = |body: &str| {
        let head = "for i in {1..4000}; do for j in {1..45}; do";
        format!("A=$(seq 9999)\n{head} {body}; done; done\ntorchrun train.py\n")
    };
    let too_long = [
        format!("torchrun train.py $(( {}1 ))\n", "1+".repeat(100_000)),
        format!("[[ {}a ]]\ntorchrun train.py\n", "! ".repeat(100_000)),
        format!("[[ {}b ]]\ntorchrun train.py\n", "a && ".repeat(100_000)),
        rounds("python train.py $i $j"),
        rounds(": ${#A}"),
        rounds("set -- $A; (:)"),
        rounds(&format!("case {}b in *{}c) ;; esac", "a".repeat(1000), "a".repeat(500))),
    ];
    for script in &too_long {
        let cause = command_of_script(script).expect_err("a bound of the reader");
        let is_bound = ["more than", "too long"].iter().any(|part| cause.contains(part));
        assert!(is_bound, "{script:.60}: {cause}");
    }
    // A value that takes too long to compute is unknown.
    let words_of = words(&format!("{names}torchrun train.py $((v60))\n"));
    assert!(words_of[2].starts_with("${"), "{}", words_of[2]);
    let zeros = "0".repeat(70_000);
    for word in [format!("{{{zeros}1..2}}"), "{1..5000}".to_owned()] {
        let words = words(&format!("torchrun train.py {word}\n"));
        assert!(words[2].starts_with("${"), "{:.60}", words[2]);
    }
    assert_eq!(words("!\ntorchrun train.py $?\n"), ["torchrun", "train.py", "1"]);
}

#[test]
fn a_file_of_flags_is_read_as_the_command() {
    let expected = ["--lr", "1e-3", "--name", "a b", "--bf16"];
    assert_eq!(words("# flags\n--lr 1e-3 \\\n  --name 'a b'\n--bf16\n"), expected);
    assert_eq!(words("--lr 1e-3 \\\r\n  --name 'a b'\r\n--bf16\r\n"), expected);
}

/// `--data-path $4` of a script without arguments was a flag without a value, and its value `true`.
#[test]
fn arguments_of_the_script_are_given_or_unknown() {
    let script = format!(
        "SAVE=$1\nWARMUP=${{3:-7}}\nf() {{ echo \"<$1>\"; }}\n\
         torchrun pretrain_gpt.py {MODEL} --data-path $2 --lr-warmup-iters $WARMUP --save $SAVE \
         --tensorboard-dir $(f) \"$@\"\n"
    );
    let run = read(&script);
    let mut names = refused(&run);
    names.sort_unstable();
    assert_eq!(names, ["--data-path", "--save"], "{run}");
    assert!(fate(&run, "--data-path").1.contains("${2}"), "{run}");
    assert_eq!(config_value(&run, "optim.lr.warmup"), "{ steps = 7 }");
    assert!(run.notes.iter().any(|note| note.contains("defaults are used: 3")), "{run}");

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.sh");
    fs::write(&path, &script).unwrap();
    let given = ["ckpt", "data/a_text_document", "9", "--seed", "5"].map(str::to_owned);
    let files = [path.to_str().unwrap().to_owned()];
    let run = import_script(ConfigFormat::Megatron, &files, None, &given).unwrap();
    assert_eq!(config_value(&run, "data.train"), "\"data/a_text_document\"");
    assert_eq!(config_value(&run, "optim.lr.warmup"), "{ steps = 9 }");
    // They follow `"$@"`, and argparse refuses words that belong to no flag.
    assert_eq!(config_value(&run, "run.seed"), "5");

    let error = command_of_script("[ -z \"$1\" ] && exit 1\npython train.py --lr $1\n");
    assert!(error.unwrap_err().contains("give them after --"));
}

/// Files of one run in a folder, and its import.
fn read_run(source: ConfigFormat, files: &[(&str, &str)]) -> Imported {
    let folder = tempfile::tempdir().unwrap();
    let write = |(name, text): &(&str, &str)| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    import(source, &files.iter().map(write).collect::<Vec<_>>(), None).unwrap()
}

fn has_note(imported: &Imported, part: &str) -> bool {
    imported.notes.iter().any(|note| note.contains(part))
}

/// The command line of PaddleFleetX overrides its YAML, in any order of the files.
#[test]
fn launch_scripts_of_paddle_are_read() {
    let script = (
        "run.sh",
        "LOG=log\nSTEPS=100\npython -m paddle.distributed.launch --log_dir $LOG \\\n    \
         --devices \"0,1,2,3\" tools/train.py -c configs/gpt.yaml \\\n    \
         -o Engine.max_steps=$STEPS -o Global.seed=7 -o Engine.mix_precision.enable=False\n",
    );
    let yaml = (
        "gpt.yaml",
        "Global:\n  seed: 1\n  local_batch_size: 4\n  micro_batch_size: 2\nEngine:\n  \
         max_steps: 500\n  mix_precision:\n    enable: True\n",
    );
    for files in [[script, yaml], [yaml, script]] {
        let run = read_run(ConfigFormat::Paddle, &files);
        for (key, expected) in [
            ("run.budget", "{ steps = 100 }"),
            ("run.seed", "7"),
            ("batch.global", "16"),
            ("precision.dtype", "absent"),
        ] {
            assert_eq!(config_value(&run, key), expected, "{run}");
        }
        assert_eq!(refused(&run), [""; 0], "{run}");
        assert!(has_note(&run, "the run had 4 ranks"), "{run}");
        assert!(!has_note(&run, "not among the files"), "{run}");
    }
    let alone = read_run(ConfigFormat::Paddle, &[script]);
    assert!(has_note(&alone, "configs/gpt.yaml is not among the files"), "{alone}");
    let odd = ("odd.sh", "python tools/train.py -c gpt.yaml -o Global.sed=7 --profile yes -o\n");
    let odd = read_run(ConfigFormat::Paddle, &[odd, yaml]);
    assert_eq!(refused(&odd), ["Global.sed", "--profile", "-o"], "{odd}");
}

#[test]
fn launch_scripts_of_colossal_are_read() {
    let config = ("pp.py", "BATCH_SIZE = 8\nSEQ_LEN = 64\nparallel = dict(pipeline=2)\n");
    for (command, ranks) in [
        ("colossalai run --nproc_per_node 4 --host n1,n2 train.py --config pp.py", 8),
        ("colossalai run --num_nodes 2 --nproc_per_node=2 train.py --config=./pp.py", 4),
        ("torchrun --standalone --nproc_per_node=2 train_gpt.py --config pp.py --from_torch", 2),
    ] {
        let run = read_run(ConfigFormat::Colossal, &[("run.sh", command), config]);
        assert_eq!(refused(&run), [""; 0], "{run}");
        assert!(has_note(&run, &format!("the run had {ranks} ranks: ")), "{run}");
        assert_eq!(config_value(&run, "parallel.pp"), "2", "{run}");
        assert_eq!(config_value(&run, "batch.global"), (4 * ranks).to_string(), "{run}");
        assert!(!has_note(&run, "not among the files"), "{run}");
    }
    let command = "#!/usr/bin/env bash\ncolossalai run --nproc_per_node 4 --hostfile hosts \
                   train.py --config pp.py --lr 3\n";
    let run = read_run(ConfigFormat::Colossal, &[("run", command), config]);
    assert_eq!(refused(&run), ["--hostfile", "--lr"], "{run}");
}
