"""Common English words: prompts for servers that take text only, and what a vocabulary is asked for with."""

_TEXT = """
able about above across act action active add after again against age ago agree air all allow almost alone along
already also always among amount animal another answer any anything appear area arm around ask away baby back bad
ball bank base be bear beat because become bed before begin behind believe below best better between big bird black
blood blue board boat body book both bottom box boy bring brother build building business but buy call can car card
care carry case catch center certain chair change check child choose church circle city clear climb close cold color
come common company compare complete consider contain continue control cook cool copy corn corner correct cost could
count country course cover cross cry current cut dark day dead deal death decide deep design develop die different
direct discover do doctor dog door down draw dream dress drink drive drop dry during each early earth ease east easy
eat edge effect egg eight either else end energy enough enter equal even evening event ever every exact example
except expect experience explain eye face fact fall family far farm fast father fear feel few field fight figure
fill final find fine finger finish fire first fish fit five floor flow flower fly follow food foot for force forest
form forward found four free fresh friend from front full game garden gas general get girl give glass go gold good
great green ground group grow guess hair half hand happen happy hard have head hear heart heat heavy help here high
hill history hit hold home hope horse hot hour house how huge human hundred idea if inch include indeed industry
instead interest iron island job join jump just keep key kind king know land language large last late laugh law lead
learn leave left leg less let letter level lie life lift light like line list listen little live local long look lot
love low machine main make man many map mark market matter may mean measure meet men middle might mile milk million
mind minute miss modern moment money month moon more morning most mother motion mountain mouth move much music must
name nation near need never new next night nine north note nothing notice now number object ocean of off offer
office often oil old once one only open order other our out over own page paint paper part party pass past path pay
people perhaps period person phrase picture piece place plain plan plane plant play point poor position possible
power press pretty problem process produce product program prove public pull push put question quick quiet quite
race rain raise reach read ready real reason receive record red region remain remember repeat reply report rest
result return rich ride right rise river road rock roll room round rule run safe sail same sand save say school
science sea season seat second see seed seem send sense sentence serve set seven several shape share sharp ship shop
short should show side sight sign silver simple since sing single sister sit six size skin sky sleep slow small
smell smile snow so soft soil some son song soon sound south space speak special speed spell spend spot spread
spring square stand star start state station stay steel step still stone stop store story straight strange stream
street strong study subject such sudden suit summer sun supply support sure surface surprise system table tail take
talk tall teach team tell ten test than that then there these thing think third this those thought thousand three
through time tiny today together too tool top touch toward town track trade train travel tree trip trouble true try
turn two type under unit until up use usual valley value very view visit voice wait walk wall want war warm wash
watch water wave way wear weather week weight well west what wheel when where which while white who whole why wide
wife will wind window winter wish with woman wonder wood word work world would write wrong yard year yellow yes yet
you young
"""

WORDS = tuple(_TEXT.split())
