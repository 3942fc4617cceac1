//! Arithmetic of `$(( ))`, `(( ))` and `let`: whole numbers of 64 bits, with the precedence of C.
//!
//! The text is read into a tree first, so that the sides of `&&`, `||` and `?:` that do not run
//! assign nothing.

use super::vars::{TEXT_BYTES_MAX, Variables};

/// Maximum depth of parentheses, operators, and variables that name variables.
const NESTED_MAX: usize = 64;

/// Maximum of signs, numbers and names in nested expressions: a stack frame for each.
const TOKENS_MAX: usize = 4096;

/// Why an expression has no value.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NoNumber {
    /// It depends on this unknown value.
    Unknown(String),
    /// It is an error in bash too.
    Wrong(String),
    /// It exceeds a limit of this parser.
    TooLong,
}

/// The value of an expression, and how many bytes were read for it. Assignments in it are made.
pub(super) fn evaluate(text: &str, variables: &mut Variables) -> (Result<i64, NoNumber>, usize) {
    let mut scope = Scope { variables, depth: 0, tokens: 0, bytes: 0 };
    let value = scope.evaluate(text);
    (value, scope.bytes)
}

/// The state of an evaluation, with its limits.
struct Scope<'a> {
    variables: &'a mut Variables,
    /// Depth of variables that name variables.
    depth: usize,
    /// Tokens of the open expressions.
    tokens: usize,
    /// Bytes read in total: a variable is an expression, which is read every time it is named.
    bytes: usize,
}

impl Scope<'_> {
    fn evaluate(&mut self, text: &str) -> Result<i64, NoNumber> {
        self.bytes += text.len() + 1;
        if self.bytes > TEXT_BYTES_MAX {
            return Err(NoNumber::TooLong);
        }
        if self.depth > NESTED_MAX {
            return Err(NoNumber::Wrong("variables that name each other".to_owned()));
        }
        let tokens = tokens(text).ok_or_else(|| wrong(text))?;
        if tokens.is_empty() {
            return Ok(0);
        }
        if self.tokens + tokens.len() > TOKENS_MAX {
            return Err(NoNumber::TooLong);
        }
        let mut parser = Parser { tokens: &tokens, at: 0, depth: 0 };
        let tree = parser.comma().filter(|_| parser.at == tokens.len());
        let tree = tree.ok_or_else(|| wrong(text))?;
        self.tokens += tokens.len();
        self.depth += 1;
        let value = tree.value(self);
        self.depth -= 1;
        self.tokens -= tokens.len();
        if matches!(value, Err(NoNumber::Unknown(_))) {
            tree.forget(self.variables);
        }
        value
    }

    fn key(&mut self, name: &str, index: &str) -> Result<String, NoNumber> {
        if self.variables.is_map(name) {
            return Ok(index.trim().to_owned());
        }
        self.evaluate(index).map(|index| index.to_string())
    }

    /// The value of a variable, which is evaluated as an expression.
    fn read(&mut self, name: &str, index: Option<&str>) -> Result<i64, NoNumber> {
        let text = match index {
            Some(index) => {
                let key = self.key(name, index)?;
                self.variables.element(name, &key)
            }
            None => self.variables.text(name),
        };
        self.evaluate(&text.unwrap_or_default())
    }

    fn write(&mut self, name: &str, index: Option<&str>, value: i64) -> Result<(), NoNumber> {
        let key = index.map(|index| self.key(name, index)).transpose()?;
        self.variables.set(name, key.as_deref(), value.to_string()).map_err(NoNumber::Wrong)
    }
}

fn wrong(text: &str) -> NoNumber {
    NoNumber::Wrong(text.trim().to_owned())
}

#[derive(Clone, Debug, PartialEq)]
enum MathToken {
    Number(i64),
    /// A variable, and the text of its index.
    Name(String, Option<String>),
    /// The name of an unknown value.
    Unknown(String),
    Sign(&'static str),
}

/// The longest first.
const SIGNS: [&str; 37] = [
    "<<=", ">>=", "**", "++", "--", "<=", ">=", "==", "!=", "&&", "||", "<<", ">>", "+=", "-=",
    "*=", "/=", "%=", "&=", "|=", "^=", "+", "-", "*", "/", "%", "<", ">", "!", "~", "&", "|", "^",
    "?", ":", "=", ",",
];

fn tokens(text: &str) -> Option<Vec<MathToken>> {
    let mut tokens = Vec::new();
    let mut rest = text.trim_start();
    while let Some(c) = rest.chars().next() {
        let len;
        if rest.starts_with("${") {
            len = super::marker_len(rest)?;
            tokens.push(MathToken::Unknown(rest[..len].to_owned()));
        } else if c.is_ascii_digit() {
            let is_part = |c: char| c.is_ascii_alphanumeric() || "#@_".contains(c);
            len = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
            tokens.push(MathToken::Number(number(&rest[..len])?));
        } else if super::is_name_char(c) {
            let end = rest.find(|c| !super::is_name_char(c)).unwrap_or(rest.len());
            let (index, after) = index(&rest[end..])?;
            len = end + after;
            tokens.push(MathToken::Name(rest[..end].to_owned(), index));
        } else if c == '(' || c == ')' {
            len = 1;
            tokens.push(MathToken::Sign(if c == '(' { "(" } else { ")" }));
        } else {
            let sign = SIGNS.into_iter().find(|sign| rest.starts_with(sign))?;
            // `--` and `++` before other than a variable are two signs.
            let is_pair = matches!(sign, "++" | "--") && !beside_name(&tokens, &rest[2..]);
            len = if is_pair { 1 } else { sign.len() };
            tokens.push(MathToken::Sign(match (is_pair, sign) {
                (true, "++") => "+",
                (true, _) => "-",
                (false, sign) => sign,
            }));
        }
        rest = rest[len..].trim_start();
    }
    Some(tokens)
}

fn beside_name(before: &[MathToken], after: &str) -> bool {
    let starts_name =
        |text: &str| text.trim_start().starts_with(|c: char| c == '_' || c.is_ascii_alphabetic());
    matches!(before.last(), Some(MathToken::Name(..))) || starts_name(after)
}

/// `[index]`, and its length.
fn index(text: &str) -> Option<(Option<String>, usize)> {
    if !text.starts_with('[') {
        return Some((None, 0));
    }
    let mut open = 0_usize;
    for (at, c) in text.char_indices() {
        match c {
            '[' => open += 1,
            ']' if open == 1 => return Some((Some(text[1..at].to_owned()), at + 1)),
            ']' => open -= 1,
            _ => {}
        }
    }
    None
}

/// Decimal, `0x` hexadecimal, `0` octal, or `base#digits`.
fn number(text: &str) -> Option<i64> {
    let (base, digits) = match text.split_once('#') {
        Some((base, digits)) => (base.parse().ok()?, digits),
        None if text.starts_with("0x") || text.starts_with("0X") => (16, &text[2..]),
        None if text.len() > 1 && text.starts_with('0') => (8, &text[1..]),
        None => (10, text),
    };
    if !(2..=36).contains(&base) {
        return None;
    }
    let digits = digits.chars().map(|c| c.to_digit(base).map(i64::from));
    let wraps = |sum: i64, digit| sum.wrapping_mul(i64::from(base)).wrapping_add(digit);
    digits.into_iter().try_fold(0_i64, |sum, digit| digit.map(|digit| wraps(sum, digit)))
}

#[derive(Debug)]
enum Math {
    Number(i64),
    Unknown(String),
    Name(String, Option<String>),
    One(&'static str, Box<Math>),
    Two(&'static str, Box<Math>, Box<Math>),
    Choice(Box<Math>, Box<Math>, Box<Math>),
    /// A variable, `=` or the operator before it, and the value.
    Assign(String, Option<String>, &'static str, Box<Math>),
    /// A variable, the increment, and whether the result is the old value.
    Step(String, Option<String>, i64, bool),
}

struct Parser<'a> {
    tokens: &'a [MathToken],
    at: usize,
    depth: usize,
}

/// Binary operators, from the lowest precedence.
const LEVELS: [&[&str]; 10] = [
    &["||"],
    &["&&"],
    &["|"],
    &["^"],
    &["&"],
    &["==", "!="],
    &["<", ">", "<=", ">="],
    &["<<", ">>"],
    &["+", "-"],
    &["*", "/", "%"],
];

impl Parser<'_> {
    fn sign(&self) -> Option<&'static str> {
        match self.tokens.get(self.at) {
            Some(MathToken::Sign(sign)) => Some(sign),
            _ => None,
        }
    }

    fn take(&mut self, sign: &str) -> Option<()> {
        (self.sign()? == sign).then(|| self.at += 1)
    }

    fn comma(&mut self) -> Option<Math> {
        let mut left = self.assignment()?;
        while self.take(",").is_some() {
            left = Math::Two(",", Box::new(left), Box::new(self.assignment()?));
        }
        Some(left)
    }

    fn assignment(&mut self) -> Option<Math> {
        self.depth += 1;
        if self.depth > NESTED_MAX {
            return None;
        }
        let assigned = self.assigned();
        let tree = match assigned {
            Some((name, index, operator)) => {
                self.at += 2;
                Math::Assign(name, index, operator, Box::new(self.assignment()?))
            }
            None => self.choice()?,
        };
        self.depth -= 1;
        Some(tree)
    }

    fn assigned(&self) -> Option<(String, Option<String>, &'static str)> {
        let MathToken::Name(name, index) = self.tokens.get(self.at)? else { return None };
        let MathToken::Sign(sign) = self.tokens.get(self.at + 1)? else { return None };
        let operator = sign.strip_suffix('=')?;
        let compares = matches!(*sign, "==" | "!=" | "<=" | ">=");
        (!compares).then(|| (name.clone(), index.clone(), operator))
    }

    fn choice(&mut self) -> Option<Math> {
        let condition = self.level(0)?;
        if self.take("?").is_none() {
            return Some(condition);
        }
        let yes = self.comma()?;
        self.take(":")?;
        self.depth += 1;
        let no = (self.depth <= NESTED_MAX).then(|| self.choice()).flatten()?;
        self.depth -= 1;
        Some(Math::Choice(Box::new(condition), Box::new(yes), Box::new(no)))
    }

    fn level(&mut self, level: usize) -> Option<Math> {
        let Some(signs) = LEVELS.get(level) else { return self.power() };
        let mut left = self.level(level + 1)?;
        while let Some(sign) = self.sign().filter(|sign| signs.contains(sign)) {
            self.at += 1;
            left = Math::Two(sign, Box::new(left), Box::new(self.level(level + 1)?));
        }
        Some(left)
    }

    /// The right side first.
    fn power(&mut self) -> Option<Math> {
        let left = self.unary()?;
        if self.take("**").is_none() {
            return Some(left);
        }
        self.depth += 1;
        let right = (self.depth <= NESTED_MAX).then(|| self.power()).flatten()?;
        self.depth -= 1;
        Some(Math::Two("**", Box::new(left), Box::new(right)))
    }

    fn unary(&mut self) -> Option<Math> {
        self.depth += 1;
        if self.depth > NESTED_MAX {
            return None;
        }
        let tree = match self.sign() {
            Some(sign @ ("!" | "~" | "-" | "+")) => {
                self.at += 1;
                Math::One(sign, Box::new(self.unary()?))
            }
            Some(sign @ ("++" | "--")) => {
                self.at += 1;
                let MathToken::Name(name, index) = self.tokens.get(self.at)?.clone() else {
                    return None;
                };
                self.at += 1;
                Math::Step(name, index, if sign == "++" { 1 } else { -1 }, false)
            }
            _ => self.atom()?,
        };
        self.depth -= 1;
        Some(tree)
    }

    fn atom(&mut self) -> Option<Math> {
        let token = self.tokens.get(self.at)?.clone();
        self.at += 1;
        match token {
            MathToken::Number(number) => Some(Math::Number(number)),
            MathToken::Name(name, index) => {
                let step = self.sign().filter(|sign| ["++", "--"].contains(sign));
                match step {
                    Some(sign) => {
                        self.at += 1;
                        Some(Math::Step(name, index, if sign == "++" { 1 } else { -1 }, true))
                    }
                    None => Some(Math::Name(name, index)),
                }
            }
            MathToken::Unknown(name) => Some(Math::Unknown(name)),
            MathToken::Sign("(") => {
                let inner = self.comma()?;
                self.take(")")?;
                Some(inner)
            }
            MathToken::Sign(_) => None,
        }
    }
}

impl Math {
    fn value(&self, scope: &mut Scope<'_>) -> Result<i64, NoNumber> {
        match self {
            Math::Number(number) => Ok(*number),
            Math::Unknown(name) => Err(NoNumber::Unknown(name.clone())),
            Math::Name(name, index) => scope.read(name, index.as_deref()),
            Math::One(sign, of) => {
                let of = of.value(scope)?;
                Ok(match *sign {
                    "!" => i64::from(of == 0),
                    "~" => !of,
                    "-" => of.wrapping_neg(),
                    _ => of,
                })
            }
            Math::Two("&&", left, right) => {
                let left = left.value(scope)?;
                Ok(i64::from(left != 0 && right.value(scope)? != 0))
            }
            Math::Two("||", left, right) => {
                let left = left.value(scope)?;
                Ok(i64::from(left != 0 || right.value(scope)? != 0))
            }
            Math::Two(sign, left, right) => {
                let left = left.value(scope)?;
                apply(sign, left, right.value(scope)?)
            }
            Math::Choice(condition, yes, no) => {
                let side = if condition.value(scope)? == 0 { no } else { yes };
                side.value(scope)
            }
            Math::Assign(name, index, operator, value) => {
                let old =
                    if operator.is_empty() { 0 } else { scope.read(name, index.as_deref())? };
                let value = value.value(scope)?;
                let value = if operator.is_empty() { value } else { apply(operator, old, value)? };
                scope.write(name, index.as_deref(), value)?;
                Ok(value)
            }
            Math::Step(name, index, by, is_old) => {
                let old = scope.read(name, index.as_deref())?;
                scope.write(name, index.as_deref(), old.wrapping_add(*by))?;
                Ok(if *is_old { old } else { old.wrapping_add(*by) })
            }
        }
    }
}

impl Math {
    /// The variable that it would assign becomes unknown too.
    fn forget(&self, variables: &mut Variables) {
        match self {
            Math::Number(_) | Math::Unknown(_) | Math::Name(..) => {}
            Math::One(_, of) => of.forget(variables),
            Math::Two(_, left, right) => {
                left.forget(variables);
                right.forget(variables);
            }
            Math::Choice(condition, yes, no) => {
                [condition, yes, no].into_iter().for_each(|side| side.forget(variables));
            }
            Math::Assign(name, _, _, value) => {
                variables.forget(name);
                value.forget(variables);
            }
            Math::Step(name, ..) => variables.forget(name),
        }
    }
}

fn apply(sign: &str, left: i64, right: i64) -> Result<i64, NoNumber> {
    let by = |right: i64| if right == 0 { Err(wrong("division by 0")) } else { Ok(right) };
    Ok(match sign {
        "+" => left.wrapping_add(right),
        "-" => left.wrapping_sub(right),
        "*" => left.wrapping_mul(right),
        "/" => left.wrapping_div(by(right)?),
        "%" => left.wrapping_rem(by(right)?),
        "**" => {
            let power = u64::try_from(right).map_err(|_| wrong("exponent less than 0"))?;
            let power = u32::try_from(power).map_err(|_| wrong("exponent too large"))?;
            left.wrapping_pow(power)
        }
        "<<" => left.wrapping_shl(right as u32),
        ">>" => left.wrapping_shr(right as u32),
        "<" => i64::from(left < right),
        ">" => i64::from(left > right),
        "<=" => i64::from(left <= right),
        ">=" => i64::from(left >= right),
        "==" => i64::from(left == right),
        "!=" => i64::from(left != right),
        "&" => left & right,
        "|" => left | right,
        "^" => left ^ right,
        _ => right,
    })
}
