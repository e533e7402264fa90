"""Data of `phrasing.py`: feedback in other languages and emoji, in the format of `phrases.py`."""

from __future__ import annotations

MULTILINGUAL_WORDS = {
    # German
    "danke": (
        "danke|vielen dank|danke schön|danke sehr|dankeschön|besten dank|herzlichen dank|thx|merci|danke dir"
        "|tausend dank"
    ),
    "gut": (
        "gut|super|toll|prima|perfekt|klasse|spitze|genau richtig|sehr gut|wunderbar|schön|hilfreich|richtig"
        "|großartig|cool"
    ),
    "schlecht": ("schlecht|falsch|nicht gut|nicht richtig|unbrauchbar|mist|quatsch|nicht hilfreich|ungenau|furchtbar"),
    # French
    "mercif": "merci|merci bien|merci beaucoup|un grand merci|mille mercis|merci à toi",
    "bien": "parfait|super|génial|très bien|excellent|bravo|nickel|c'est bon|top|utile|exact|magnifique",
    "mal": "faux|mauvais|nul|pas bon|incorrect|pas correct|inutile|pas ça|horrible",
    # Spanish
    "graciasp": "gracias|muchas gracias|mil gracias|gracias amigo|te lo agradezco",
    "bueno": "perfecto|genial|muy bien|excelente|bueno|estupendo|correcto|útil|muy útil|fantástico|vale",
    "malo": "mal|muy mal|incorrecto|malo|no sirve|inútil|equivocado|no es correcto|terrible|falso",
    # Italian
    "grazie": "grazie|grazie mille|molte grazie|tante grazie",
    "bene": "perfetto|ottimo|bene|molto bene|bravo|fantastico|giusto|bellissimo|utile",
    "male": "sbagliato|male|non va bene|non è giusto|pessimo|inutile|errato|brutto",
    # Portuguese
    "obrigado": "obrigado|obrigada|muito obrigado|valeu|obrigadão",
    "bom": "perfeito|ótimo|muito bom|legal|excelente|certo|bom|maravilha",
    "ruim": "errado|ruim|mau|não está certo|péssimo|não serve|incorreto",
    # Dutch, Swedish, Polish
    "dank": "bedankt|dank je|dank je wel|hartelijk dank|dankjewel",
    "goed": "goed|heel goed|perfect|prima|mooi|geweldig|top|precies goed",
    "fouten": "fout|niet goed|slecht|verkeerd|onjuist|waardeloos",
    "tack": "tack|tack så mycket|tusen tack|tackar",
    "bra": "bra|jättebra|perfekt|toppen|utmärkt|fint",
    "dålig": "fel|dåligt|inte bra|inte rätt|värdelöst",
    "dzieki": "dzięki|dziękuję|wielkie dzięki|dzieki",
    "dobrze": "super|świetnie|dobrze|idealnie|doskonale|bardzo dobrze",
    "zle": "źle|niedobrze|błąd|nie tak|to nie to|słabo",
    "happy": "👍|👍🏻|👌|❤️|🙏|🎉|😊|😀|😃|😄|🙂|😍|🥰|💯|✅|👏|🙌|💪|⭐|🔥|😁|🤩|💚|🥳|:)|:-)|:D|<3|;)|^^|xD",
    "sad": "👎|👎🏻|😡|😠|😞|😢|😒|🙄|❌|😤|🤦|💩|😭|🤮|🚫|😕|☹️|:(|:-(|:/|>:(|:'(",
    "plain": "🤔|🐱|🌧|☕|🚗|🏠|🍕|📷|⏰|🌍|🐶|🍎|📎|🎸|🌳|🕐",
}

MULTILINGUAL_LIKED = """
{danke}|{danke}!|{danke}, {gut}|{gut}, {danke}|{gut}|{gut}!|das ist {gut}|das war {gut}|ja, {gut}|ja {danke}
ok {danke}|sieht {gut} aus|passt, {danke}|genau so|genau das wollte ich|läuft|das hilft mir, {danke}|gefällt mir
funktioniert, {danke}|{mercif}|{mercif}!|{bien}|{bien}, {mercif}|{mercif}, {bien}|oui {bien}|oui, {mercif}
c'est {bien}|ça marche|ça marche, {mercif}|j'aime bien|exactement ce que je voulais|ok {mercif}|{graciasp}
{graciasp}!|{bueno}|{bueno}, {graciasp}|{graciasp}, {bueno}|sí, {bueno}|sí {graciasp}|está {bueno}|me gusta
me gusta mucho|me encanta|justo lo que quería|funciona, {graciasp}|ok {graciasp}|{grazie}|{grazie}!|{bene}
{bene}, {grazie}|{grazie}, {bene}|sì, {bene}|mi piace|va bene, {grazie}|funziona|proprio quello che volevo
{obrigado}|{obrigado}!|{bom}|{bom}, {obrigado}|{obrigado}, {bom}|sim, {bom}|gostei|gostei muito
funciona, {obrigado}|era isso|{dank}|{dank}!|{goed}|{goed}, {dank}|{dank}, {goed}|ja, {goed}|dat is {goed}
werkt, {dank}|{tack}|{tack}!|{bra}|{bra}, {tack}|{tack}, {bra}|ja, {bra}|det är {bra}|{dzieki}|{dzieki}!|{dobrze}
{dobrze}, {dzieki}|tak, {dobrze}|спасибо|спасибо большое|отлично|супер|хорошо, спасибо|谢谢
很好|非常好|谢谢你|ありがとう
ありがとうございます|いいね|감사합니다|고마워|धन्यवाद|شكرا|teşekkürler|çok iyi|kiitos
takk|tusen takk|mange tak|děkuji|köszönöm
mulțumesc|ευχαριστώ|{happy}|{happy}{happy}|{happy} {happy}|{happy}{happy}{happy}
~ {gut} gemacht|{danke}, das ist {gut}|{mercif}, c'est {bien}|{graciasp}, está {bueno}|{dank}, dat is {goed}
~ oh, {gut}|{grazie}, è {bene}|{bom} demais
"""

MULTILINGUAL_DISLIKED = """
{schlecht}|{schlecht}!|nein|nein!|nee|nö|nein, {schlecht}|das ist {schlecht}|das war {schlecht}
nein, das ist {schlecht}|nochmal|nochmal bitte|bitte nochmal|das wollte ich nicht|nicht das, was ich wollte
gefällt mir nicht|stimmt nicht|versuch es nochmal|{mal}|{mal}!|non, {mal}|non non|non merci|c'est {mal}
ce n'est pas ce que je voulais|je n'aime pas|encore une fois|recommence|ça ne marche pas|pas du tout|{malo}
{malo}!|no, {malo}|está {malo}|eso está {malo}|no es lo que quería|no me gusta nada|otra vez|inténtalo de nuevo
hazlo otra vez|no funciona|{male}|{male}!|no, {male}|è {male}|non mi piace|non è quello che volevo|riprova
di nuovo|non funziona|{ruim}|{ruim}!|não, {ruim}|não|está {ruim}|não gostei|não era isso|de novo|tente de novo
não funciona|{fouten}|{fouten}!|nee, {fouten}|nee!|dat is {fouten}|opnieuw|dat wilde ik niet|werkt niet|{dålig}
nej|nej, {dålig}|det är {dålig}|igen|försök igen|{zle}|nie|nie, {zle}|to jest {zle}|jeszcze raz|нет|плохо
неправильно|не то|不|不对|不好|错了|違います|ダメ|いいえ|아니요|नहीं|لا|hayır|yanlış
ei|nei|ne|nem|nu|όχι|{sad}|{sad}{sad}
{sad} {sad}
~ das ist leider {schlecht}|nein nein, {schlecht}|non, c'est {mal}|no, está {malo}|nee, dat is {fouten}
~ sorry, {schlecht}|questo è {male}|isso está {ruim}
"""

MULTILINGUAL_UNREADABLE = """
{plain}|{plain}{plain}|guten morgen|bonjour|hola|ciao|bis später|à demain|hasta luego|wie spät ist es
quelle heure est-il|qué hora es|ich bin gleich zurück|moment|un momento|attends|ich muss los|mein hund bellt
il pleut|hace frío|ich trinke kaffee|je mange du pain|tengo un gato|wo ist der bus|où est la gare
dónde está la casa|lunes|dienstag|vendredi|rot|bleu|verde|привет|завтра|你好|明天|こんにちは|안녕|مرحبا
~ wo ist mein hund|je bois du café|tengo un perro|der bus kommt später
"""

MULTILINGUAL_WISHED = {
    "python": """
bitte {X}|in {X} bitte|auf {X} bitte|ich wollte {X}|ich brauche {X}|nein, {X}|lieber {X}|nicht {Y}, {X}
en {X} s'il te plaît|en {X} stp|je voulais {X}|en {X} por favor|quería {X}|prefiero {X}|mejor en {X}
in {X} per favore|volevo {X}|em {X} por favor|in {X} graag|på {X} tack
~ mach es in {X}|plutôt en {X}|quiero {X}
""",
    "concise": """
zu lang|viel zu lang|kürzer bitte|bitte kürzer|kurz bitte|mach es kurz|kürzer|fass dich kurz|trop long|plus court
plus court svp|en bref|demasiado largo|más corto|más corto por favor|más breve|troppo lungo|più corto
più breve per favore|muito longo|mais curto|te lang|korter graag|för långt|kortare
~ das ist zu lang|c'est trop long|es muy largo
""",
    "detailed": """
zu kurz|viel zu kurz|mehr details|ausführlicher bitte|bitte ausführlicher|erklär mehr|genauer bitte|mehr bitte
länger bitte|trop court|plus de détails|plus long svp|explique plus|demasiado corto|más detalles
más detalles por favor|explica más|troppo corto|più dettagli|più lungo|muito curto|mais detalhes|te kort
meer details graag|för kort|mer detaljer
~ das ist zu kurz|c'est trop court|es muy corto
""",
    "formal": """
zu locker|formeller bitte|bitte formell|höflicher bitte|förmlich bitte|das ist für meinen chef|mit sie bitte
trop familier|plus formel|plus poli svp|c'est pour mon chef|más formal|más formal por favor|es para mi jefe
demasiado informal|più formale|più formale per favore|mais formal|formeler graag|mer formellt
~ das ist zu locker|c'est trop familier|es para el director
""",
    "friendly": """
zu förmlich|zu steif|lockerer|bitte lockerer|freundlicher bitte|netter bitte|das ist für einen freund|trop formel
plus amical|plus sympa svp|c'est pour un ami|más amigable|más informal por favor|es para un amigo|demasiado formal
più amichevole|meno formale|mais amigável|vriendelijker graag|vänligare tack
~ das ist zu steif|c'est trop formel|es para mi hermana
""",
}
MULTILINGUAL_WISHED["javascript"] = MULTILINGUAL_WISHED["python"]
