"""Data of `phrasing.py`: handwritten feedback, held out to measure the judge on unseen phrases.

The training data has none of these phrases, nor any that differs only in case, punctuation and spaces.
"""

from __future__ import annotations

LIKED = """
thx
thx!
ty
tysm
thanks
thanks a bunch
thank u so much
Thank you very much.
cheers mate
great job!
good job
nice one
nice work
well done
awesome
awesome thanks!!
perfect 👍
👍
👍👍
❤️
🙏
🎉
cool thx
ok thanks
okay great
that works
works for me
works great, ty
yes!
yep thats it
yes, exactly
exactly what i wanted
just what i needed thanks
love it
love this
looks good
looks good to me
lgtm
brilliant
super
super, danke
danke
danke dir
Danke schön!
vielen dank
passt
merci
merci beaucoup
parfait merci
gracias
muchas gracias
perfecto
grazie mille
obrigado
bedankt
tack
great, thats correct
this is right
very helpful
so helpful thank you
you rock
amazing work
haha nice
wow great
spot on
much better
that is better
good answer
sweet, thanks
""".strip().splitlines()

DISLIKED = """
no
nope
no.
NO!!
wrong
that's wrong
thats not right
not what i asked for
not what i wanted
this is bad
bad answer
terrible
i dont like it
i don't like this at all
hmm no
nah
👎
😡
try again
do it again
again please
please redo
this sucks
useless
that is not correct
not good
no that is wrong
nein
nein, falsch
das ist falsch
non
c'est faux
no me gusta
está mal
sbagliato
errado
fout
""".strip().splitlines()

WISHES = {
    "python": """
python pls
in python please
i wanted python
no, python
use python next time
can you do it in python?
i dont know javascript, python pls
not js, python!
python not javascript
why javascript? i use python
bitte in python
should be python
rewrite in python
""",
    "javascript": """
js pls
in javascript please
i wanted javascript
js not python
no, javascript
i need js for my website
can i have that in javascript
use js please
i dont use python
en javascript por favor
should have been javascript
rewrite it in js
wrong language, i want javascript
""",
    "concise": """
too long
way too long
tl;dr
shorter pls
make it short
can you be brief
less text please
too many words
just one sentence
keep it short next time
i wanted a short answer
zu lang
shorter!
""",
    "detailed": """
too short
more detail pls
tell me more
explain more
i need more details
can you explain in more detail
longer please
not enough detail
go deeper
thats too short for me
give me the long version
mehr details bitte
more please
""",
    "formal": """
too casual
more formal pls
make it formal
be more polite
its for my boss
more professional please
this is a business email
not so casual
i wanted a formal note
way too informal
sounds unprofessional
förmlicher bitte
formal please
""",
    "friendly": """
too formal
more casual pls
make it friendly
be nicer
too stiff
its for a friend
less formal please
more relaxed please
friendlier pls
not so formal
sounds cold, make it warm
lockerer bitte
i wanted it casual
""",
}

UNREADABLE = """
asdfgh
qwertz
...
hm
hmm
?
???
🤔
brb
one sec
let me check
ill try it later
what time is it
ok
so
lorem ipsum dolor
xxxx
42
blue
my cat is asleep
where are you from
anyway
next question
kdjfh skdjf
teh qck brwn
and now
wait
what about tomorrow
i am back
see you
""".strip().splitlines()

HANDWRITTEN: tuple[tuple[str, int, str | None], ...] = (
    *((text, 1, None) for text in LIKED),
    *((text, -1, None) for text in DISLIKED),
    *((text, -1, style) for style, texts in WISHES.items() for text in texts.strip().splitlines()),
    *((text, 0, None) for text in UNREADABLE),
)
"""(text, right vote, requested style or None)."""
