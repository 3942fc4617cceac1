//! Random launch scripts, compared with the arguments that bash passes to their program.
//!
//! A generator composes scripts from constructs of launch scripts. Bash runs each with a stand-in
//! for the launcher, which records its arguments. The import must find the same arguments, or name
//! the unknown ones; it must never differ silently.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use recipe::import::command_of_script;

const SEED: u64 = 20_260_727;

/// To run more scripts: SCRIPTS=5000 cargo test -p recipe shell_oracle
fn count() -> u64 {
    std::env::var("SCRIPTS").ok().and_then(|count| count.parse().ok()).unwrap_or(200)
}

#[test]
fn random_scripts_expand_as_in_bash() {
    let folder = tempfile::tempdir().unwrap();
    stand_ins(folder.path());
    let (mut equal, mut named, mut silent) = (0, 0, Vec::new());
    for number in 0..count() {
        let seed = SEED + number;
        let script = Generator::new(seed).script();
        // Bash needs hours for arrays that grow in nested loops; 200 scripts have none.
        let Some(expected) = by_bash(folder.path(), &script) else { continue };
        match command_of_script(&script) {
            Ok(found) if found.words == expected => equal += 1,
            Ok(found) => {
                let is_named = !found.doubts.is_empty()
                    || found.words.iter().any(|word| word.contains("${"))
                    || found.notes.iter().any(|note| note.contains("otherwise nothing"));
                let found = found.words;
                silent.extend((!is_named).then(|| {
                    format!("seed {seed}\n{script}\nbash:  {expected:?}\nfound: {found:?}")
                }));
                named += 1;
            }
            Err(_) => named += 1,
        }
    }
    let first = silent.iter().take(3).map(String::as_str).collect::<Vec<_>>().join("\n\n");
    assert!(silent.is_empty(), "{} differ silently\n{first}", silent.len());
    println!("{equal} equal, {named} named as unknown");
    // A third of the generated scripts needs values from outside of the script.
    assert!(equal > named, "{equal} equal, {named} named as unknown");
}

/// Scripts that bash refuses would test nothing, and neither would a comparison that cannot fail.
#[test]
fn the_oracle_sees_the_arguments_and_a_difference() {
    let folder = tempfile::tempdir().unwrap();
    stand_ins(folder.path());
    let words = |script: &str| by_bash(folder.path(), script).unwrap();
    let script = "A='x y'\ntorchrun --nnodes 1 train.py $A \"$A\" '' \"a\nb\"\n";
    let expected = ["torchrun", "--nnodes", "1", "train.py", "x", "y", "x y", "", "a\nb"];
    assert_eq!(words(script), expected);
    assert_eq!(command_of_script(script).unwrap().words, expected);
    assert_ne!(words("torchrun train.py 1\n"), words("torchrun train.py 2\n"));
    assert_eq!(words("exit 0\n"), [""; 0]);
}

/// Programs that print their name and arguments.
fn stand_ins(folder: &Path) {
    let bin = folder.join("bin");
    fs::create_dir(&bin).unwrap();
    fs::create_dir(folder.join("empty")).unwrap();
    for name in ["torchrun", "python", "srun"] {
        let out = folder.join("arguments");
        let text = format!("#!/bin/bash\nprintf '%s\\0' {name} \"$@\" > {}\n", out.display());
        let path = bin.join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
}

/// The words of the last program that bash starts; empty if it starts none, `None` if it does not
/// end.
fn by_bash(folder: &Path, script: &str) -> Option<Vec<String>> {
    let (path, out) = (folder.join("run.sh"), folder.join("arguments"));
    fs::write(&path, script).unwrap();
    _ = fs::remove_file(&out);
    let bin = format!("{}:/usr/bin:/bin", folder.join("bin").display());
    let home = std::env::var("HOME").unwrap_or_default();
    let mut command = Command::new("timeout");
    command.args(["20", "bash"]).arg(&path).env_clear().env("PATH", bin).env("HOME", home);
    let output = command.current_dir(folder.join("empty")).output().unwrap();
    if output.status.code() == Some(124) {
        return None;
    }
    let bytes = fs::read(&out).unwrap_or_default();
    let text = String::from_utf8(bytes).unwrap();
    Some(text.split_terminator('\0').map(str::to_owned).collect())
}

struct Generator {
    state: u64,
    out: String,
    depth: usize,
    loops: usize,
}

const NAMES: [&str; 6] = ["A", "BATCH", "LR", "N", "OPTS", "x1"];
const NUMBERS: [&str; 4] = ["P", "Q", "R", "S"];
const WORDS: [&str; 10] =
    ["8", "1e-4", "gpt2", "--bf16", "a b", "data/my corpus", "x=y", "--lr 0.1  --wd 2", "", "a,b"];

impl Generator {
    fn new(seed: u64) -> Self {
        let state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        Generator { state, out: String::new(), depth: 0, loops: 0 }
    }

    /// A number below `most`, by xorshift64*.
    fn below(&mut self, most: usize) -> usize {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        (self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % most
    }

    fn one<'a>(&mut self, of: &[&'a str]) -> &'a str {
        of[self.below(of.len())]
    }

    fn name(&mut self) -> &'static str {
        self.one(&NAMES)
    }

    fn number(&mut self) -> &'static str {
        self.one(&NUMBERS)
    }

    fn script(mut self) -> String {
        self.out.push_str("#!/bin/bash\n");
        if self.below(8) == 0 {
            self.out.push_str("set -e\n");
        }
        for name in NAMES {
            let word = self.one(&WORDS);
            writeln!(self.out, "{name}='{word}'").unwrap();
        }
        for name in NUMBERS {
            let value = self.below(12);
            writeln!(self.out, "{name}={value}").unwrap();
        }
        self.out.push_str("ARR=(one 'two words' 3)\nf() {\n  local y=$1\n  shift\n  ");
        self.out.push_str("echo \"$y:$#:$*\"\n}\n");
        self.out.push_str("g() { A=\"g$1\"; R=$((R + ${2:-1})); return $(( $1 % 2 )); }\n");
        for _ in 0..3 + self.below(8) {
            self.statement();
        }
        let launcher = self.one(&["torchrun", "python", "srun python", "torchrun --nnodes $P"]);
        write!(self.out, "{launcher} train.py").unwrap();
        for _ in 0..3 + self.below(4) {
            let word = self.word();
            write!(self.out, " \\\n  --{} {word}", self.depth).unwrap();
        }
        for name in NAMES {
            write!(self.out, " \"${name}\"").unwrap();
        }
        self.out.push_str(" $P $Q $R $S \"${ARR[@]}\"\n");
        self.out
    }

    fn statement(&mut self) {
        self.depth += 1;
        let kinds = if self.depth > 3 { 12 } else { 24 };
        match self.below(kinds) {
            0..2 => self.assignment(),
            2..4 => self.calculation(),
            4 => self.array(),
            5 => self.reading(),
            6 => self.declaration(),
            7 => self.call(),
            8 => self.and_or(),
            9 => self.positional(),
            10 => self.evaluation(),
            11 => self.unknown(),
            12..15 => self.choice(),
            15..17 => self.cases(),
            17..20 => self.looped(),
            20 => self.group("(", ")"),
            21 => self.group("{", "}"),
            22 => self.pipe(),
            _ => self.function(),
        }
        self.depth -= 1;
    }

    fn body(&mut self) {
        for _ in 0..=self.below(2) {
            self.statement();
        }
    }

    fn assignment(&mut self) {
        let (name, word) = (self.name(), self.word());
        let sign = self.one(&["=", "=", "+="]);
        writeln!(self.out, "{name}{sign}{word}").unwrap();
    }

    fn calculation(&mut self) {
        let (name, math) = (self.number(), self.math(0));
        let by = self.below(5);
        let line = match self.below(6) {
            0 => format!("(( {name} = {math} ))"),
            1 => format!("let \"{name} = {math}\""),
            2 => format!("let {name}+={by}"),
            3 => format!("(( {name}++ ))"),
            4 => format!("{name}=$(({name} + {by}))"),
            _ => format!("{name}=$(( {math} ))"),
        };
        self.out.push_str(&line);
        self.out.push('\n');
    }

    fn math(&mut self, depth: usize) -> String {
        if depth > 3 || self.below(4) == 0 {
            return match self.below(4) {
                0 => format!("${}", self.number()),
                1 => format!("${{{}}}", self.number()),
                2 => self.number().to_owned(),
                _ => self.below(20).to_string(),
            };
        }
        let (a, b) = (self.math(depth + 1), self.math(depth + 1));
        match self.below(11) {
            0 => format!("({a})"),
            1 => format!("-({a})"),
            2 => format!("!{a}"),
            3 => format!("{a} ? {b} : {a}"),
            4 => format!("{a} ** {}", self.below(4)),
            5 => format!("({a}) / ({b} + 1)"),
            6 => format!("{a} % (({b}) * ({b}) + 1)"),
            7 => {
                let sign = self.one(&["<", ">", "<=", ">=", "==", "!="]);
                format!("{a} {sign} {b}")
            }
            8 => {
                let sign = self.one(&["&&", "||", "&", "|", "^", "<<", ">>"]);
                format!("({a}) {sign} {b}")
            }
            _ => {
                let sign = self.one(&["+", "-", "*", "+", "*"]);
                format!("{a} {sign} {b}")
            }
        }
    }

    fn array(&mut self) {
        let (a, b) = (self.word(), self.word());
        let at = self.below(3);
        let name = self.name();
        let line = match self.below(7) {
            0 => format!("ARR=({a} {b})"),
            1 => format!("ARR+=({a} {b})"),
            2 => format!("ARR[{at}]={a}"),
            3 => format!("{name}=\"${{ARR[{at}]}}\""),
            4 => format!("{name}=${{#ARR[@]}}"),
            5 => format!("{name}=\"${{ARR[@]:1}}\""),
            _ => format!("{name}=\"${{ARR[*]}}\""),
        };
        self.out.push_str(&line);
        self.out.push('\n');
    }

    fn reading(&mut self) {
        let (a, b) = (self.name(), self.name());
        let word = self.word();
        let line = match self.below(6) {
            0 => format!("read -r {a} {b} <<< {word}"),
            1 => format!("IFS=, read -r {a} {b} <<< {word}"),
            2 => format!("read -ra ARR <<< {word}"),
            3 => format!("{a}=$(cat <<EOF\nx ${b} \"q\"\n  y\nEOF\n)"),
            4 => format!("{a}=$(cat <<'EOF'\nx $b\nEOF\n)"),
            _ => format!("read -r {a} <<EOF\n${b} z\nEOF"),
        };
        self.out.push_str(&line);
        self.out.push('\n');
    }

    fn declaration(&mut self) {
        let (a, b, word) = (self.name(), self.number(), self.word());
        let math = self.math(2);
        let line = match self.below(7) {
            0 => format!("export {a}={word}"),
            1 => format!("declare {a}={word}"),
            2 => format!("typeset {a}={word}"),
            3 => format!("declare -i {b}=\"{math}\""),
            4 => format!("unset {a}"),
            5 => format!("readonly RO{b}={word}\n{a}=$RO{b}"),
            _ => format!("printf -v {a} '%s-%03d' {word} 7"),
        };
        self.out.push_str(&line);
        self.out.push('\n');
    }

    fn call(&mut self) {
        let (a, word, by) = (self.name(), self.word(), self.below(9));
        let line = match self.below(5) {
            0 => format!("{a}=$(f {word} {by})"),
            1 => format!("{a}=\"$(f \"{by}\" {word})\""),
            2 => format!("g {by} || true"),
            3 => format!("g {by} 3 && {a}=yes || {a}=no"),
            _ => format!("{a}=`echo {by} $Q`"),
        };
        self.out.push_str(&line);
        self.out.push('\n');
    }

    fn and_or(&mut self) {
        let (condition, other) = (self.condition(), self.condition());
        let (a, word) = (self.name(), self.word());
        let line = match self.below(4) {
            0 => format!("{condition} && {a}={word}"),
            1 => format!("{condition} || {a}={word}"),
            2 => format!("{condition} && {a}={word} || {a}=other"),
            _ => format!("{condition} || {other} && {a}+={word}"),
        };
        self.out.push_str(&line);
        self.out.push('\n');
    }

    fn positional(&mut self) {
        let (a, word, by) = (self.name(), self.word(), self.below(9));
        let line = match self.below(4) {
            0 => format!("set -- {word} {by}\n{a}=\"$1\""),
            1 => format!("{a}=\"${{1:-{by}}}\""),
            2 => format!("set -- a {word} c\nshift\n{a}=\"$#$*\""),
            _ => format!("{a}=\"$@\""),
        };
        self.out.push_str(&line);
        self.out.push('\n');
    }

    fn evaluation(&mut self) {
        let (a, b, word, by) = (self.name(), self.name(), self.word(), self.below(9));
        let line = match self.below(5) {
            0 => format!("eval \"{a}={by}\""),
            1 => format!("CMD=\"{a}=\\\"${{#{b}}} x\\\"\"\neval $CMD"),
            2 => format!("{a}=$(bash -c 'echo \"$0 $1\"' {by} q)"),
            3 => format!("export {b}\n{a}=$(bash -c 'echo ${b}')"),
            _ => format!("{a}=$(printf '%s,' {by} {word})"),
        };
        self.out.push_str(&line);
        self.out.push('\n');
    }

    fn unknown(&mut self) {
        let (a, by) = (self.name(), self.below(9));
        let line = match self.below(12) {
            0 => format!("{a}=$(date +%s)"),
            1 => format!("[ -f nowhere ] && {a}={by}"),
            2 => format!("if [ -d \"$OUTSIDE\" ]; then {a}={by}; fi"),
            3 => format!("{a}=${{OUTSIDE:-{by}}}"),
            4 => "[ -e nowhere ] && echo there".to_owned(),
            5 => format!("mkdir -p out{by}"),
            6 => format!("while read -r line; do {a}=$line; done < /dev/null"),
            _ => format!("{a}=\"{by} ${{#{a}}}\""),
        };
        self.out.push_str(&line);
        self.out.push('\n');
    }

    fn choice(&mut self) {
        let condition = self.condition();
        writeln!(self.out, "if {condition}; then").unwrap();
        self.body();
        if self.below(3) == 0 {
            let condition = self.condition();
            writeln!(self.out, "elif {condition}; then").unwrap();
            self.body();
        }
        if self.below(2) == 0 {
            self.out.push_str("else\n");
            self.body();
        }
        self.out.push_str("fi\n");
    }

    fn condition(&mut self) -> String {
        let (a, b, p, q) = (self.name(), self.name(), self.number(), self.number());
        let (word, math) = (self.one(&["8", "gpt2", "a b", ""]), self.math(2));
        let sign = self.one(&["-eq", "-ne", "-lt", "-le", "-gt", "-ge"]);
        match self.below(14) {
            0 => format!("[ \"${a}\" = \"{word}\" ]"),
            1 => format!("[ ${p} {sign} ${q} ]"),
            2 => format!("[[ ${a} == ${b} ]]"),
            3 => format!("[[ ${a} == g* && ${p} {sign} {q} ]]"),
            4 => format!("[[ -z ${a} || -n \"{word}\" ]]"),
            5 => format!("[ -n \"${a}\" -a ${p} {sign} 3 ]"),
            6 => format!("(( {math} ))"),
            7 => format!("! [ -z \"${a}\" ]"),
            8 => format!("[[ ${a} =~ ^[0-9]+$ ]]"),
            9 => format!("[[ ! ( ${p} -gt 3 && -n ${a} ) ]]"),
            10 => format!("test \"${a}\" != \"${b}\""),
            11 => format!("[[ \"${a}\" < \"{word}\" ]]"),
            12 => format!("[ \"${a}\" = \"{word}\" ] || [ ${q} {sign} 4 ]"),
            _ => format!("[[ ${a} != *[[:digit:]]* ]]"),
        }
    }

    fn cases(&mut self) {
        let a = self.name();
        writeln!(self.out, "case \"${a}\" in").unwrap();
        for pattern in ["8|g*", "*[0-9]*", "\"a b\"", "*"] {
            writeln!(self.out, "  {pattern})").unwrap();
            self.body();
            let end = self.one(&[";;", ";;", ";;", ";&", ";;&"]);
            writeln!(self.out, "  {end}").unwrap();
        }
        self.out.push_str("esac\n");
    }

    fn looped(&mut self) {
        self.loops += 1;
        let counter = format!("i{}", self.loops);
        let (word, a) = (self.word(), self.name());
        let head = match self.below(6) {
            0 => format!("for {counter} in 1 {word} z; do"),
            1 => format!("for (({counter}=0; {counter}<3; {counter}++)); do"),
            2 => format!("{counter}=0\nwhile [ ${counter} -lt 2 ]; do\n(({counter}+=1))"),
            3 => format!("for {counter} in {{1..3}} \"${{ARR[@]}}\"; do"),
            4 => format!("{counter}=2\nuntil (({counter} == 0)); do\n{counter}=$(({counter}-1))"),
            _ => format!("for (({counter}=0;;)); do\n(({counter}++ > 1)) && break"),
        };
        writeln!(self.out, "{head}").unwrap();
        if self.below(3) == 0 {
            let (sign, condition) = (self.one(&["break", "continue"]), self.condition());
            writeln!(self.out, "{condition} && {sign}").unwrap();
        }
        writeln!(self.out, "{a}+=\"${counter}\"").unwrap();
        self.body();
        self.out.push_str("done\n");
    }

    fn group(&mut self, open: &str, close: &str) {
        writeln!(self.out, "{open} ").unwrap();
        self.body();
        writeln!(self.out, "{close}").unwrap();
    }

    fn pipe(&mut self) {
        let (a, word) = (self.name(), self.word());
        let line = match self.below(4) {
            0 => format!("{a}=$(echo {word} | cat)"),
            1 => format!("echo {word} | read -r {a}"),
            2 => format!("echo {word} | while read -r l; do {a}=$l; done"),
            _ => format!("{a}=$(echo q; echo {word} >&2; echo r)"),
        };
        self.out.push_str(&line);
        self.out.push('\n');
    }

    fn function(&mut self) {
        self.loops += 1;
        let name = format!("fn{}", self.loops);
        let a = self.name();
        let head = self.one(&["()", " ()"]);
        writeln!(self.out, "{name}{head} {{\nlocal {a}=\"in $1\"").unwrap();
        self.body();
        let word = self.word();
        writeln!(self.out, "N=\"${a}/$2\"\n}}\n{name} {word} end").unwrap();
    }

    /// A word as an argument or a value.
    fn word(&mut self) -> String {
        let (a, b, p) = (self.name(), self.name(), self.number());
        let math = self.math(2);
        match self.below(30) {
            0..3 => format!("\"${a}\""),
            3..5 => format!("${a}"),
            5 => format!("\"${{{a}:-${b}}}\""),
            6 => format!("${{{a}:-${{{b}:-7}}}}"),
            7 => format!("${{{a}:+\"x ${b}\"}}"),
            8 => format!("\"${{{a}%.*}}\""),
            9 => format!("\"${{{a}##*/}}\""),
            10 => format!("\"${{{a}/a/Z}}\""),
            11 => format!("\"${{{a}//[0-9]/-}}\""),
            12 => format!("\"${{{a}^^}}${{{b}^}}${{{b},,}}\""),
            13 => format!("\"${{{a}:1:3}}\""),
            14 => format!("${{#{a}}}"),
            15 => format!("$(( {math} ))"),
            16 => format!("a${p}\"b ${a}\"'c $d'"),
            17 => format!("x{{1,${p}}}y"),
            18 => "$'tab\\there'".to_owned(),
            19 => format!("\"$(echo ${a})\""),
            20 => "'single \"quoted\" $A'".to_owned(),
            21 => format!("\"\\$A \\\"${b}\\\" \\\\ \""),
            22 => format!("\"${{{a}: -2}}\""),
            23 => format!("${{{a}:=set}}"),
            24 => format!("${{OUT-d${p}}}"),
            25 => format!("pre${{{a}}}post"),
            26 => "\\ \\$".to_owned(),
            27 => format!("\"${{{a}/%b/ends}}\""),
            28 => format!("\"${{{a}:-two  'spaces' ${b}}}\""),
            _ => self.below(100).to_string(),
        }
    }
}
