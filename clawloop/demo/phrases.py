"""Data of `phrasing.py`: words and sentence patterns of feedback in English.

`{word}` in a pattern stands for one of `WORDS["word"]`; variants are separated by "|". Patterns after `HELD_OUT_MARK`
are never used in training.
"""

from __future__ import annotations

HELD_OUT_MARK = "~"


def split(text: str) -> tuple[str, ...]:
    """Split a text into its variants, which are separated by "|" and line ends."""
    return tuple(part.strip() for line in text.strip().splitlines() for part in line.split("|") if part.strip())


WORDS = {
    "thanks": (
        "thanks|thank you|thx|ty|tysm|thanks a lot|many thanks|thank u|thnx|tks|cheers|thank you so much"
        "|thanks so much|thanks a ton|thank you very much|much appreciated|appreciate it|big thanks|thanks again|tyvm"
    ),
    "good": (
        "good|great|nice|perfect|awesome|excellent|lovely|wonderful|fantastic|cool|brilliant|amazing|superb|super"
        "|neat|sweet|fine|beautiful|fab|terrific|top|helpful|useful|clear|correct|right|solid|impressive|ideal"
    ),
    "very": "very|really|so|super|pretty|quite|absolutely|totally|just",
    "yes": "yes|yep|yeah|yup|yess|oh yes|ok|okay|alright|ah|wow|haha|right|sure|oh|hey",
    "it": "it|this|that|this one|the answer|your answer|the reply|this answer|this reply",
    "job": "job|work|answer|reply|one|stuff|response|result|solution|explanation|note|code",
    "works": (
        "works|works fine|works well|works perfectly|does the job|does the trick|did it|helps|helps a lot|helped"
        "|helped me a lot|solved it|runs|runs fine|fits|is all i need|is enough for me|makes sense"
    ),
    "love": ("love|like|really like|adore|enjoy|appreciate|am happy with|am pleased with|can use|will use|will take"),
    "wanted": "wanted|needed|asked for|was looking for|was hoping for|had in mind|meant|was after",
    "exactly": "exactly|precisely|just|totally|pretty much",
    "bad": (
        "bad|wrong|poor|terrible|awful|useless|incorrect|horrible|no good|not good|not great|not right|not correct"
        "|not ok|not helpful|not useful|rubbish|weak|nonsense|a mess|not nice|disappointing|annoying|garbage|lame"
        "|unusable|not what i need|not it|off|broken|crap|stupid|mediocre"
    ),
    "no": "no|nope|nah|noo|no no|hmm no|sorry no|uh no|oh no|eh no|well no|um no|err no|no sorry|not really",
    "hate": (
        "don't like|dont like|do not like|hate|dislike|can't use|cant use|cannot use|don't want|dont want"
        "|am not happy with|am unhappy with|am not satisfied with|can't accept|don't need|didn't want|didnt want"
    ),
    "redo": (
        "try again|do it again|redo it|redo this|start over|one more time|again|try that again|do that again"
        "|give it another try|have another go|fix it|fix this|fix that|change it|change that|please improve|try harder"
        "|rewrite it|write it again|make it better|do better"
    ),
    "please": (
        "please|pls|plz|please!|pleeease|if you can|if possible|thanks|thx|ok?|this time|from now on|next time"
        "|in future|always|instead"
    ),
    "can": (
        "can you|could you|would you|can u|could u|will you|please|pls|you should|you have to|i want you to"
        "|i'd like you to|i need you to|next time|can you please|could you please|in future"
    ),
    "want": (
        "i want|i wanted|i need|i needed|i prefer|i'd prefer|i'd like|i would like|give me|i asked for|i like"
        "|i expected|i was expecting|i'd rather have|i'm looking for|i only use|i always want|i meant|let me have"
        "|we need|it should be|it must be|should be|must be|make that|better"
    ),
    "why": "why|why is this|why is that|how come it is|why did you write it|why this",
    "python": (
        "python|Python|py|python code|python3|a python version|Python code|python version|a python function|pyhton"
    ),
    "javascript": (
        "javascript|JavaScript|js|java script|javascript code|JS|a js version|JavaScript code|js code"
        "|a javascript function|node js|javscript"
    ),
    "short": (
        "short|shorter|brief|briefer|concise|more concise|compact|crisp|to the point|a bit shorter|much shorter"
        "|really short|short and sweet|snappy|terse|one line"
    ),
    "shortly": (
        "a short answer|one sentence|a single sentence|a short version|a summary|the short version|fewer words"
        "|less words|less text|a quick answer|only the main point|just the basics|a brief answer|a one liner"
        "|less detail|something shorter|fewer details|a concise answer|two lines at most|just the gist"
    ),
    "wordy": (
        "long|wordy|verbose|much text|many words|lengthy|detailed|much to read|long-winded|much information|chatty"
    ),
    "long": (
        "longer|more detailed|detailed|deeper|more thorough|thorough|more complete|in depth|more in depth|fuller"
        "|a bit longer|much longer|more elaborate|more precise|more informative"
    ),
    "fully": (
        "more detail|more details|more information|more info|a longer answer|the full story|the whole story"
        "|the details|a detailed answer|an in depth answer|a longer version|more explanation|more background"
        "|a thorough answer|more depth|a full explanation|more text|more words|something longer|all the details"
    ),
    "thin": (
        "short|brief|thin|little|superficial|shallow|vague|concise|little detail|little information|little text"
        "|incomplete|terse|basic"
    ),
    "explain": (
        "explain more|say more|tell me more|explain it in detail|go into detail|elaborate|expand on it"
        "|explain that properly|go deeper|write more|add more|add details|give details|be more detailed"
        "|explain further"
    ),
    "formal": (
        "formal|more formal|polite|more polite|professional|more professional|businesslike|official|serious"
        "|more serious|respectful|more respectful|proper|a bit more formal|much more formal|more official|courteous"
    ),
    "formally": (
        "a formal tone|a formal note|a professional tone|a formal letter|a polite tone|formal language"
        "|a business tone|polite words|a proper salutation|a formal version|a serious tone|an official tone"
        "|dear instead of hey"
    ),
    "chummy": (
        "casual|informal|relaxed|chatty|friendly|sloppy|chummy|familiar|loose|laid back|cheeky|buddy like"
        "|unprofessional"
    ),
    "boss": (
        "my boss|my manager|a client|a customer|the director|my professor|a business partner|an official letter"
        "|the ceo|a company|an authority|the bank|work|the office"
    ),
    "friendly": (
        "friendly|friendlier|more friendly|warm|warmer|casual|more casual|relaxed|more relaxed|informal|nicer"
        "|more informal|less formal|less stiff|kind|kinder|cheerful|a bit friendlier|much friendlier|personal"
        "|more personal|light|easygoing|less serious|cosy"
    ),
    "friendlily": (
        "a friendly tone|a casual tone|a warm tone|a friendly note|a relaxed tone|casual language|a casual note"
        "|a friendly version|a personal touch|a nicer tone|a casual message|hey instead of dear|less formality"
    ),
    "stiff": ("formal|stiff|cold|serious|distant|official|businesslike|polite|boring|impersonal|dry|bureaucratic|posh"),
    "friend": (
        "a friend|my friend|my buddy|my mate|friends|my sister|my brother|family|a close colleague|my best friend"
        "|my mom|my team mates|someone i know well"
    ),
    "too": "too|way too|far too|much too|a bit too|a little too|wayyy too|really too|so|just too",
    "thing": (
        "the meeting|dinner|my dog|the weather|football|my keys|the bus|a film|the garden|music|lunch|my phone"
        "|the kids|a song|the train|coffee|the shop|my bike|the news|holidays|a book|the street|some cake"
        "|the neighbours"
    ),
    "does": (
        "goes|runs|sleeps|eats|opens|closes|starts|ends|falls|sings|waits|comes|stops|breaks|arrives|leaves|turns|grows"
        "|moves|rings|drives|looks|stays|plays|costs|weighs|begins|cooks|reads|swims|flies|jumps|knows|sees|buys|sells"
    ),
    "any": (
        "blue|old|new|seven|green|small|big|round|two|wooden|cold|warm|empty|full|red|sixty|young|tall|silver|other"
        "|paper|metal|french|yellow|heavy|early|late|open|quiet|loud|half|grey|sunny|rainy|foreign|hidden"
    ),
    "who": (
        "i|you|we|they|he|she|my uncle|the teacher|our dog|a man|the woman|somebody|nobody|my neighbour|the driver"
        "|a bird|the cat|the king|a friend of mine|the doctor|our team|the children|a girl|the cook|my aunt"
    ),
    "where": (
        "at home|in paris|in the kitchen|on the roof|near the sea|in the office|upstairs|outside|at school|in the box"
        "|under the bed|on the table|at the station|in the forest|behind the house|in town|on the moon|over there"
    ),
    "doing": (
        "looking at|thinking about|waiting for|talking about|reading about|going to|busy with|listening to|done with"
    ),
    "later": ("later|tomorrow|in a minute|tonight|next week|soon|after lunch|now|in an hour|on monday|this evening"),
}

LIKED = """
{thanks}|{thanks}!|{yes} {thanks}|{thanks}, {good}|{good}, {thanks}|{good} {thanks}|{good}|{good}!|{very} {good}
{very} {good}, {thanks}|{good} {job}|{good} {job}, {thanks}|{thanks}, {good} {job}|{it} is {good}
{it} is {very} {good}|{it} {works}|{it} {works}, {thanks}|{thanks}, {it} {works}|{yes}, {it} {works}|{yes}, {good}
{yes} {good} {job}|{exactly} what i {wanted}|{thanks}, {exactly} what i {wanted}|{yes}, {exactly} what i {wanted}
{it} is {exactly} what i {wanted}|{it} is what i {wanted}|{good}, {exactly} what i {wanted}|i {love} {it}
{thanks}, i {love} {it}|i {love} {it}, {thanks}|i {very} {love} {it}|{yes} i {love} {it}|looks {good}
looks {very} {good}|that looks {good}, {thanks}|sounds {good}|sounds {good}, {thanks}|{good} as always
you are {good}|you're {very} {good}|what a {good} {job}|such a {good} {job}|{thanks} for the {good} {job}
{thanks} for {it}|{thanks} for your help|{thanks}, that was {good}|that was {good}|that was {very} {good}
that's {good}|thats {good}|thats {very} {good} {thanks}|now it is {good}|much better|much better, {thanks}
better now, {thanks}|{good}, i {love} it|perfect|perfect, {thanks}|couldn't be better
could not be better, {thanks}|well done|well done, {thanks}|bravo|keep it up|keep going like this
keep it like that, {thanks}|more like this please|always like this please|no complaints|nothing to change
nothing to add, {thanks}|no changes needed|10/10|5 stars|a+|full marks|you nailed it|nailed it|you got it
got it, {thanks}|got it {thanks}|understood, {thanks}|now i understand, {thanks}|now i get it
makes sense, {thanks}|{it} helped me|i learned something, {thanks}|so {good}|soo {good}|how {good}|i'm happy
i am happy with {it}|i am {very} happy|happy with {it}|made my day|you made my day|that's it|thats it {thanks}
that is it!|{good} {good}|{yes} {yes}|hooray|yay|yay {thanks}|woohoo|legend|you're a legend|you are the best
ur the best|you're the best, {thanks}|best answer ever|best {job}|i'll take it|i will use that
i'll use {it}, {thanks}|sold|deal|agreed|kudos|hats off|respect|chapeau|good stuff|good enough, {thanks}
fair enough, {thanks}|all good|all good {thanks}|it's all {good}
~ {it} {works} for me {thanks}|{thanks} a million|you did a {good} {job}|i think {it} is {good}
~ {good} {good} {thanks}|oh {good}|{thanks}, {very} kind of you|{it} was {exactly} what i {wanted}|{thanks} {thanks}
~ really {love} the {job}|{thanks}, that {works}|hey {thanks} for that|yes that's {good}|{it} is {good}, i {love} it
~ you are so {good}, {thanks}|right on, {thanks}|wow {very} {good} {job}
"""

DISLIKED = """
{no}|{no}!|{no}, {bad}|{bad}|{bad}!|{very} {bad}|{it} is {bad}|{it} is {very} {bad}|{no}, {it} is {bad}
{no} {it} is {bad}|that's {bad}|thats {bad}|that was {bad}|{bad} {job}|{very} {bad} {job}|what a {bad} {job}
i {hate} {it}|{no}, i {hate} {it}|{no} i {hate} {it}|sorry, i {hate} {it}|{redo}|{redo}, please|please {redo}
{no}, {redo}|{no} {redo}|{bad}, {redo}|{it} is {bad}, {redo}|{can} {redo}|{can} {redo}?|not what i {wanted}
{it} is not what i {wanted}|that's not what i {wanted}|thats not what i {wanted}|{no}, not what i {wanted}
this isn't what i {wanted}|i {wanted} something else|{no}, i {wanted} something else
i {wanted} something different|not {good}|not {very} {good}|{it} is not {good}|that's not {good}|{it} isn't {good}
not a {good} {job}|{it} does not help|{it} doesn't help|doesnt help|{it} doesn't work|doesnt work
{it} does not work|didn't work|{it} did not work|not working|not helpful|this makes no sense|makes no sense
{it} makes no sense|i'm disappointed|i am disappointed|very disappointed|i'm not happy|i am not happy with {it}
i am not satisfied|not satisfied|i am unhappy with {it}|{it} is not {good} enough|not {good} enough
could be better|{it} could be better|you can do better|you got it wrong|you are wrong|you're wrong|ur wrong
that's a mistake|there is a mistake|you made a mistake|there is an error in {it}|{it} has errors|full of errors
you misunderstood me|you misunderstood|you didn't listen|you did not read my question|read my question again
that's not my question|that is not an answer|not an answer|are you kidding|are you serious|seriously?|come on
oh come on|ugh|ugh {no}|yuck|meh|boo|wtf|what is this|what is that supposed to be|{bad} {bad}|so {bad}|soo {bad}
how {bad}|worst answer ever|worst {job}|0/10|1 star|fail|epic fail|i expected better|i expected more from you
you failed|{it} failed|i can't work with {it}|stop doing that|stop it|don't do that|never do that again
i'm annoyed|this annoys me|waste of time|a waste of time|still {bad}|still not right|still wrong|again {bad}
worse than before|{no} {no}|never|not like this|not like that|i {hate} the way you did {it}|something is wrong
something's off|that's off|can't be right|that cannot be right|i doubt that|false|not true|untrue
~ i think {it} is {bad}|sorry but {it} is {bad}|{no}, try something else|{it} was {very} {bad}|i really {hate} {it}
~ {bad}, i {hate} it|well that is {bad}|you did a {bad} {job}|{no} that's not {good}
~ this is not what i {wanted} at all|oh {no}, {bad}|{bad} {bad} {bad}|please {redo}, {it} is {bad}
~ hmm, {it} is {bad}|{no}, {redo} please|i said {redo}|your {job} is {bad}
"""

# A wish for a language: `{X}` is the preferred one, `{Y}` the other one.
WISHED_CODE = """
{X}|{X} {please}|{X}, {please}|{please} {X}|{X}!|in {X}|in {X} {please}|in {X}, {please}|{can} use {X}
{can} use {X}?|{can} write it in {X}|{can} do it in {X}|{can} write {X}|{can} redo this in {X}|{can} give me {X}
use {X}|use {X} {please}|{want} {X}|{want} {X} {please}|{want} it in {X}|{want} {X}, not {Y}|{want} {X} not {Y}
{no}, {X}|{no} {X}|{no}, use {X}|{no}, in {X} {please}|{no}, {want} {X}|not {Y}, {X}|not {Y} but {X}|not {Y}!! {X}
no {Y}, use {X}|{X} not {Y}|{X}, not {Y}|{X} instead of {Y}|{X} is better|{X} is what i {wanted}|i {wanted} {X}
i {wanted} {X}, not {Y}|{it} is {Y}, {want} {X}|that's {Y}. {want} {X}|this is {Y}, i {wanted} {X}
i don't use {Y}, use {X}|i dont know {Y}, {X} {please}|i don't understand {Y}, {can} use {X}
i can't read {Y}, {X} {please}|i hate {Y}, {X} {please}|we use {X} here|we only use {X}|my project is in {X}
my project uses {X}, not {Y}|i work with {X}|i only know {X}|i am learning {X}|translate it to {X}
convert it to {X}|port it to {X}|change it to {X}|switch to {X}|switch to {X} {please}|go with {X}|prefer {X}
i prefer {X} to {Y}|i prefer {X}|same in {X}|same thing in {X} {please}|the same but in {X}|same but {X}
again in {X}|again, in {X} {please}|once more in {X}|redo in {X}|try {X}|try again in {X}|how about {X}
what about {X}?|and in {X}?|wrong language, {X} {please}|wrong language. {want} {X}|{thanks} but in {X} {please}
{thanks} but {want} {X}|{good}, but {want} {X}|{good} but in {X}|ok but in {X}|where is the {X}|why not {X}
why not in {X}?|why {Y}? {want} {X}|why is it in {Y}|why {Y}|who uses {Y}? {X} {please}|no {Y} {please}|not {Y}
not in {Y}|not {Y} {please}|stop using {Y}|don't use {Y}|i {hate} {Y}|anything but {Y}|never {Y}|next time {X}
next time in {X}|always {X}|always use {X}|from now on {X}|for code always {X}|my language is {X}|i'm a {X} person
i code in {X}|{X} or nothing|{X} {X} {X}
~ {want} the code in {X}|i told you {X}|{no} not {Y}, {X} {please}|could this be in {X}
~ {Y} is not for me, {want} {X}|everything in {X} {please}|{X} would be better|i would love {X}|{bad}, {X} {please}
~ sorry, {want} {X}|{can} switch to {X}|{X} only|only {X} {please}|rather in {X}|my team writes {X}
~ give it to me in {X}|{can} answer in {X}
"""

# A wish for a manner: `{adj}` or `{noun}` describe the preferred one, `{fault}` the one to avoid.
WISHED_MANNER = """
{adj}|{adj} {please}|{adj}, {please}|{please} {adj}|{adj}!|make it {adj}|make it {adj} {please}
{can} make it {adj}|{can} be {adj}|{can} be {adj}?|be {adj}|be {adj} {please}|{want} it {adj}
{want} something {adj}|{want} {noun}|{want} {noun} {please}|{noun} {please}|{noun}, {please}|{noun}
{can} give me {noun}|{can} use {noun}|with {noun} {please}|{too} {fault}|{too} {fault}!|{it} is {too} {fault}
that's {too} {fault}|thats {too} {fault}|{no}, {too} {fault}|{no} {too} {fault}|{too} {fault}, {adj} {please}
{too} {fault}, make it {adj}|{too} {fault}, {want} {noun}|{too} {fault} for me|that is {too} {fault} for me
this is {too} {fault}, {can} be {adj}|{no}, {adj} {please}|{no}, {noun} {please}|{no}, {want} {noun}
{no}, make it {adj}|not so {fault}|not so {fault} {please}|not that {fault}|not {fault}|not {fault} {please}
less {fault}|less {fault} {please}|don't be so {fault}|stop being so {fault}|{why} {too} {fault}|{why} so {fault}
{why} so {fault}?|{it} sounds {too} {fault}|sounds {fault}|{it} reads {fault}|sounds {too} {fault}, {adj} {please}
{good} but {too} {fault}|{good}, but {adj} {please}|{thanks} but {too} {fault}|{thanks} but {adj} {please}
{thanks}, but {want} {noun}|ok but {adj} {please}|ok but make it {adj}|it should be {adj}
it should be {adj}, not {fault}|it has to be {adj}|it could be {adj}|{adj}, not {fault}|{adj} not so {fault}
{adj} is better|i prefer {noun}|i prefer it {adj}|i like it {adj}|i would like it {adj}|i hate {fault} answers
i don't like it {fault}|keep it {adj}|keep it {adj} {please}|always {adj}|next time {adj}|from now on {adj}
from now on {noun}|next time {noun} {please}|again but {adj}|again, {adj} {please}|try again, {adj}|same but {adj}
the same but {adj}|the same with {noun}|rewrite it, {adj}|redo it {adj}|a {adj} version|a {adj} one {please}
a {adj} answer {please}|a {adj} tone {please}|{adj} {adj}|{bad}, {too} {fault}|{it} is {bad}, {too} {fault}
wrong tone, {adj} {please}|i asked for {noun}|where is {noun}|i miss {noun}|i {hate} {it}, {too} {fault}
i {wanted} {noun}|i {wanted} it {adj}|i {wanted} something {adj}|i said {adj}|why not {adj}
~ {want} {noun}, not so {fault}|{can} write it {adj}|{no} not so {fault}|could this be {adj}
~ far {too} {fault} {please}|it would be better {adj}|{it} is {fault}, i prefer {noun}|really {adj} {please}
~ sorry, {too} {fault}|{bad}, {adj} {please}|it's {too} {fault}|a little {adj} {please}|{noun} would be better
~ i'd love {noun}|everything {adj} {please}|{too} {fault} {too} {fault}
"""

WISHED_BY_STYLE = {
    "concise": """
tldr|tl;dr {please}|tl dr?|in one sentence|in one sentence {please}|one sentence is enough|one sentence {please}
who should read all that|i won't read all that|i can't read all this|i don't have time for that
no time to read that|i have no time, {adj} {please}|get to the point|come to the point {please}|cut it down|cut it
trim it|shorten it|shorten that {please}|{can} shorten it|sum it up|summarize|summarize it {please}
{can} summarize|don't explain so much|don't write so much|you talk too much|you write too much|stop rambling
no novels please|a wall of text|wall of text|half of that is enough|skip the details|i don't need the details
no details {please}|spare me the details|less is more|too much text|too much|too much information|tmi
that's a lot of text|brevity {please}|be brief
~ i only have a minute|in a nutshell {please}|{can} cut it short|i didn't ask for a novel|leave out the details
""",
    "detailed": """
{explain}|{explain} {please}|please {explain}|{can} {explain}|{can} {explain}?|{no}, {explain}
{too} {fault}, {explain}|why?|why is that so|how does it work|how does that work exactly|and then?|and how?
is that all|is that all?|that's all?|that is all you know?|one sentence is not enough|one sentence isn't enough
i don't understand, {explain}|i still don't get it, {explain}|i want to understand it, {explain}
i want to know more|i want to learn more|i'd like to know more|more|more {please}|more info|give me more|need more
there must be more|step by step {please}|explain step by step|with examples {please}|too little|too little text
not enough|not detailed enough|not enough information|don't be so short|i have time, {explain}
i have plenty of time, {adj} {please}|in detail|in detail {please}|in full {please}|what else
what else can you say|go on|keep explaining
~ {explain} next time|i expected a longer answer|i need to understand the details|{can} tell me everything
~ you left out a lot
""",
    "formal": """
it's for {boss}|its for {boss}|this is for {boss}|this goes to {boss}|i send this to {boss}
it's for {boss}, {adj} {please}|this is for {boss}, {too} {fault}|i can't send that to {boss}
can't say hey to {boss}|you don't say hey to {boss}|we are not friends|they are not my friend
they are not my buddy|no hey|no hey {please}|don't write hey|don't say cheers|no cheers|say dear|start with dear
use dear|dear, not hey|write kind regards|more respect {please}|show some respect|with more respect
this is business|it's a business letter|i need it for {boss}|mind your manners|not professional enough
not formal enough|not polite enough|better manners please
~ {boss} will read it|we don't know each other that well|{boss} would be shocked|use kind regards
~ for {boss} it has to be {adj}
""",
    "friendly": """
it's for {friend}|its for {friend}|this is for {friend}|this goes to {friend}|i send this to {friend}
it's for {friend}, {adj} {please}|this is for {friend}, {too} {fault}|we are friends|we are good friends
we know each other well|they are my friend|nobody talks like that|who talks like that|i don't talk like that
no dear|no dear {please}|don't write dear|don't say kind regards|no kind regards|say hey|say hi|start with hey
use hey|hey, not dear|write cheers|not friendly enough|not warm enough|not casual enough|more heart {please}
with a smile {please}|loosen up|relax a bit|lighten up|chill|this is not a business letter
it's not a letter to the bank|i'm not writing to the queen|sounds like a robot
~ {friend} will read it|like talking to {friend}|{friend} would laugh at that|use cheers
~ we have known each other for years
""",
}

UNREADABLE = """
{who} {does} {where}|{who} {does} {later}|the {any} {any} one|{who} {does} {thing}|{thing} {does}|{thing} {does} {where}
{any} {thing}|{where}|{who} has {any} shoes|how many {any} ones are there|does {who} know {thing}|{later} {who} {does}
{who} and {who} {where}|when {who} {does}|a {any} car {where}
there are {any} trees {where}|{any} and {any}|{who} was {where}
is it {any} {where}|{who} said {later}|why does {thing} cost 5
what is {thing}|who is {where}|which {thing}|{any} {later}
i am {doing} {thing}|i'm {doing} {thing} {later}|i was {doing} {thing}|{thing}|{thing} {later}|{later}
see you {later}|talk {later}|maybe {later}|i'll look {later}|i will read it {later}|let me read it {later}
let me see|let me think|one moment|just a moment|hold on|give me a second|brb {later}|afk|back {later}|i'm back
hello|hi|hey|hello again|good morning|good evening|good night|bye|bye bye|anyone there|are you there|test|testing
test test|who are you|what are you|what can you do|how old are you|where do you live|what's your name
do you like {thing}|do you know {thing}|what time is it {later}|how is {thing}|where is {thing}|when is {thing}
is {thing} open {later}|did you see {thing}|my {thing}|the {thing}|{thing} and {thing}|{thing} {thing}|{thing}?
i have {thing}|i saw {thing} {later}|it is {later}|it's raining|it is cold {later}|i'm hungry|i am tired
i am at work|i am {later} at home|well|hmm|hmmm|mm|uh|um|er|eh|aha|i see|ok so|so what|and|but|or|if|then|also
by the way|btw {thing}|speaking of {thing}|about {thing}|another thing|something else now|new topic|next|next one
on to the next|let's go on|let's continue|continue|moving on|now something different|question|one question
i have a question|can i ask something|may i ask something|{thing} costs 5|1 2 3|12345|3.14|abc|abc def|foo bar|foo
xyz|la la la|blah|blah blah|bla bla|yada yada|red|green|monday|tuesday|paris|london|december|seven|apple|banana
water|house|table|window|ship|yellow|north|winter|uncle|guitar|i don't know yet|not sure yet|i can't tell yet
we'll see|i'll tell you {later}|i have to check|i need to test it first|i haven't tried it yet|did not read it yet
i'll ask {thing}|my cat says hi|the dog barks|someone is at the door|the phone rings|wrong chat|wrong window
that was meant for someone else|oops
~ i'm going to {thing} {later}|have you heard about {thing}|{thing} is {later}|my {thing} is here
~ i am {doing} my {thing}|i'd like {thing} {later}|there is {thing}|we met {later}|what is the capital of france
~ it is 5 o'clock|nine ten eleven|i have not looked at it yet|need to think about it|let me come back {later}
"""
